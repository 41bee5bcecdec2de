"""Traces a model with ``torch.export``, in training mode, for a symbolic number of samples.

Connectionist temporal classification (CTC), which cannot be traced: sizes depend on the targets.

    ctc_loss(log_probs, targets, lengths...)  ->  one loss a sample, kept whole
                                              ->  reduction, as plain operators

The losses of the samples are one opaque operator. The reduction of `torch.nn.functional.ctc_loss`
(the sum, or the mean of losses over target lengths) is traced like any other. So slices of a batch
are weighted as for any other loss.

Makes ``tensor.data`` an operator while a model is traced.

    self.weight.data.clamp_(-1, 1)       in a stage, too, autograd does not record the write
    teacher.data = m * teacher.data      the same as teacher.data.copy_(m * teacher.data)

Otherwise tracing would treat the result of ``.data`` as a constant, and lose what is assigned.

Handles ``module.to(dtype)`` in forward while a model is traced: no operation, or refused.

    self.classifier = self.classifier.to(self.dtype)      already so: traced as no operation

Tracing has replaced the module's parameters by tensors without values, which cannot be replaced
again.
"""

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.exc import UserError
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.export import Dim
from torch.fx.experimental import _config
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.nn import functional

from penstock.capture.asked import DataDependence, NotKept, asked_values
from penstock.capture.batch_layout import BatchLayout
from penstock.capture.called_by_name import Callee, callees_at, replaced_callees
from penstock.capture.capture_errors import (
    REMEDY,
    GoesByValues,
    capture_failed,
    current_line,
    data_dependent,
    fixes_samples,
    guards_in,
    hold_for_all_rows,
)
from penstock.capture.chance import refusing_chance
from penstock.capture.hooks import check_hooks, keeping_hooks
from penstock.capture.kept_calls import KeptCalls
from penstock.capture.kept_modules import OwnOperators, keeping_modules
from penstock.capture.length_conditions import LEAVES
from penstock.capture.loss_module import LossModule
from penstock.capture.opaque import (
    OpaqueTable,
    call_opaquely,
    keep_opaque_calls,
    keeping_custom_functions,
    recording_opaque_calls,
    refused,
    refused_at,
)
from penstock.capture.operators import same_shape
from penstock.capture.python_state import StateChange, check_changes, kept_python_state
from penstock.capture.recorded_values import replaying
from penstock.capture.sample_lists import symbolic_samples
from penstock.capture.sample_pieces import NotJoined, listing_sizes
from penstock.capture.torch_calls import TorchCalls, replaced
from penstock.capture.training_flags import as_trained
from penstock.errors import CaptureFailed, PenstockError

__all__ = ["export_module", "home_device"]

LEAST_TRACED_ROWS = 2
"""Tracing treats sizes 0 and 1 as constants."""

MOST_ROWS = 1 << 31
"""A bound that keeps PyTorch's own rounded ranges of sizes within integers."""


def home_device(module: nn.Module) -> torch.device:
    """The device of the module's tensors: meta if any is there, else that of the first tensor."""
    devices = [t.device for t in (*module.parameters(), *module.buffers())]
    if any(device.type == "meta" for device in devices):
        return torch.device("meta")
    return devices[0] if devices else torch.device("cpu")


def export_module(
    module: LossModule,
    leaves: Sequence[torch.Tensor],
    layout: BatchLayout,
) -> fx.GraphModule:
    """The operators of ``module`` on ``leaves``, in training mode, for any number of rows.

    Dimensions that ``layout`` declares to vary are symbolic too. What the code assumes about them
    is in the guards of the result. Module flags, buffers and random state are restored.

    Raises:
        CaptureFailed: the code cannot be traced, or only for one number of rows, or one length.
    """
    check_hooks(module.model)
    home = home_device(module)
    example = tuple(_enough_rows(leaf.detach().to(home)) for leaf in leaves)
    rows = Dim("rows", min=LEAST_TRACED_ROWS, max=MOST_ROWS)
    # Not given the name of the rows: named dimensions are traced again for every limit found.
    shapes = (
        tuple({0: rows} | {dim: Dim.DYNAMIC for dim, _ in leaf.varying} for leaf in layout.leaves),
    )
    table = OpaqueTable()
    try:
        with (
            as_trained(module, module.model),
            _without_logs() as printed,
            torch.random.fork_rng(devices=[]),
            recording_opaque_calls(table),
            keeping_custom_functions(table),
            keeping_hooks(table),
            modules_stay(),
            refusing_chance(module.model),
        ):
            traced = _traced(module, example, shapes, table, printed)
            keep_opaque_calls(traced, table)
    except PenstockError:
        raise
    except Exception as error:
        if table.differentiated_at and "fake tensor" in str(error):
            why = "takes gradients of operators that torch splits where tracing does not see them"
            raise refused_at(table.differentiated_at, "torch.autograd.grad", why) from error
        names = {
            f"['{LEAVES}'][{number}].size()[{dim}]": layout.lengths[length].name
            for number, leaf in enumerate(layout.leaves)
            for dim, length in leaf.varying
        }
        failure = capture_failed(error, type(module.model).__name__, names)
        raise type(failure)(f"{failure}{_assumed_samples(layout)}") from error
    return traced


def _assumed_samples(layout: BatchLayout) -> str:
    """What to add to a refusal if tensors have unequal numbers of rows: edges are no samples."""
    fewest = next((leaf for leaf in layout.leaves if leaf.rows == 1), None)
    if fewest is None or all(leaf.rows == 1 for leaf in layout.leaves):
        return ""
    return (
        f"; {fewest.name} has {layout.batch_size} rows, so {layout.batch_size} samples were "
        f"assumed: if its dimension 0 is not the samples (the edges of a graph), transpose it, or "
        f"keep it in the model as a buffer"
    )


@dataclass(frozen=True)
class _Aids:
    """What tracing a model needs, as found so far.

    ``asked`` are the values that its code uses (None: not examined yet). At the lines
    ``not_joined`` it does more with lists of sizes than split tensors. The functions ``wanted``
    depend on values and are kept whole. Modules of the classes ``kept`` have long loops and are
    kept whole; those of ``written_out`` never are.
    """

    asked: DataDependence | None = None
    not_joined: frozenset[str] = frozenset()
    wanted: frozenset[Callee] = frozenset()
    kept: frozenset[type[nn.Module]] = frozenset()
    written_out: frozenset[type[nn.Module]] = frozenset()


def _traced(
    module: LossModule,
    example: tuple[torch.Tensor, ...],
    shapes: Any,
    table: OpaqueTable,
    printed: io.StringIO,
) -> fx.GraphModule:
    """The operators of ``module``, traced again with each aid that it turns out to need.

    Of the output in ``printed`` that of the last trace stays.
    """
    aids = _Aids()
    while True:
        printed.seek(0)
        printed.truncate()
        operators = OwnOperators(module.model, aids.kept | aids.written_out)
        refused: list[type[nn.Module]] = []
        changes: list[StateChange] = []
        asked = DataDependence() if aids.asked is None else aids.asked
        calls = KeptCalls(asked.kept, table, lambda: module.samples)
        module.inside = partial(_inside, table, operators, aids, calls, printed)
        try:
            with (
                keeping_modules(module.model, aids.kept, table, refused),
                replaced_callees(module.model, calls.callees, calls.wrap),
            ):
                traced = _exported(module, example, shapes, changes)
            module.inside = contextlib.nullcontext
            check_changes(changes, module, example)
            return traced
        except Exception as error:
            if operators.found is not None:
                aids = replace(aids, kept=aids.kept | {operators.found})
            elif refused:
                gone = frozenset(refused)
                aids = replace(aids, kept=aids.kept - gone, written_out=aids.written_out | gone)
            else:
                aids = _with_values(aids, error, module, example)
        finally:
            module.inside = contextlib.nullcontext


@contextlib.contextmanager
def _inside(
    table: OpaqueTable, operators: OwnOperators, aids: _Aids, calls: KeptCalls, printed: io.StringIO
) -> Iterator[None]:
    """The context in which the code of the model runs while it is traced."""
    calls.restart()
    with contextlib.ExitStack() as modes:
        modes.enter_context(contextlib.redirect_stderr(printed))
        modes.enter_context(operators)
        modes.enter_context(KeepCtc(table))
        modes.enter_context(KeepData())
        if aids.asked is not None:
            modes.enter_context(symbolic_samples())
            modes.enter_context(listing_sizes(aids.asked.pieces))
            modes.enter_context(replaying(aids.asked.values))
        yield


def _with_values(
    aids: _Aids, error: Exception, module: LossModule, example: Sequence[torch.Tensor]
) -> _Aids:
    """The aids, extended by the values that code uses or by a function that depends on values.

    Raises:
        Exception: ``error``, or a better one, if neither helps.
    """
    if isinstance(error, NotJoined):
        aids = replace(aids, asked=None, not_joined=aids.not_joined | {error.line})
    refused = isinstance(error, PenstockError) and not isinstance(error, NotJoined)
    if aids.asked is None and not refused:
        try:
            asked = _asked(module, example, aids)
        except GoesByValues as found:
            error = found
        else:
            if asked or fixes_samples(error):
                return replace(aids, asked=asked)
    by_values = isinstance(error, GoesByValues) or data_dependent(error)
    # The object that stands for the samples may itself make Python code fail.
    stumbles = aids.asked is not None and not isinstance(error, PenstockError)
    if not (by_values or stumbles) or home_device(module).type == "meta":
        raise error
    for callee in callees_at(error, module.model):
        if callee in aids.wanted:
            continue
        more = replace(aids, wanted=aids.wanted | {callee})
        try:
            asked = _asked(module, example, more)
        except (NotKept, GoesByValues):
            continue
        if callee in {call.callee for call in asked.kept}:
            return replace(more, asked=asked)
    raise error


def _asked(module: LossModule, example: Sequence[torch.Tensor], aids: _Aids) -> DataDependence:
    """The values that the code uses; none if it cannot run, or on meta, where none exist."""
    if home_device(module).type == "meta":
        return DataDependence()
    module.inside = contextlib.nullcontext
    try:
        return asked_values(module, example, aids.kept, aids.not_joined, aids.wanted)
    except (NotKept, PenstockError):
        raise
    except Exception:
        return DataDependence()


def _exported(
    module: LossModule, example: tuple[torch.Tensor, ...], shapes: Any, changes: list[StateChange]
) -> fx.GraphModule:
    """The operators of ``module``; ``changes`` gets the Python state that its code has changed."""
    export = partial(torch.export.export, module, example, dynamic_shapes=shapes, strict=False)
    inside = module.inside
    with kept_python_state(module.model) as state:

        @contextlib.contextmanager
        def watched() -> Iterator[None]:
            with inside(), state.watching():
                yield

        module.inside = watched
        try:
            exported = export()
        except UserError as error:
            if not guards_in(error):
                raise
            state.restore()
            if hold_for_all_rows(error):
                exported = export(prefer_deferred_runtime_asserts_over_guards=True)
            else:
                with _config.patch(backed_size_oblivious=True):  # pyright: ignore
                    exported = export()
        finally:
            module.inside = inside
    changes[:] = state.changes
    traced = exported.module()
    assert isinstance(traced, fx.GraphModule)
    return traced


def _enough_rows(leaf: torch.Tensor) -> torch.Tensor:
    repeats = -(-LEAST_TRACED_ROWS // leaf.shape[0])
    return torch.cat([leaf] * repeats) if repeats > 1 else leaf


@contextlib.contextmanager
def _without_logs() -> Iterator[io.StringIO]:
    """Suppress PyTorch's long logs on standard error; one exception explains what went wrong.

    What the model itself prints goes to the result, which is printed at the end.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            # `check_changes` reports this if it matters.
            warnings.filterwarnings("ignore", message=r"The tensor attributes? ")
            # PyTorch looks through tensors of a failed trace.
            warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor")
            yield printed
    finally:
        logging.disable(before)
        sys.stderr.write(printed.getvalue())


class KeepCtc(TorchCalls):
    """While tracing, makes ``ctc_loss`` an opaque operator of ``table`` and a reduction."""

    def __init__(self, table: OpaqueTable) -> None:
        super().__init__()
        self._table = table

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func``, or keep it whole if it is ``ctc_loss``."""
        if func is functional.ctc_loss:
            with self:
                return _ctc_loss(self._table, *args, **kwargs)
        return func(*args, **kwargs)


def _ctc_loss(
    table: OpaqueTable,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """The parameters are those of `torch.nn.functional.ctc_loss`."""
    for lengths in (input_lengths, target_lengths):
        if not isinstance(lengths, torch.Tensor):
            raise CaptureFailed(
                f"ctc_loss at {current_line()} gets lengths that are no tensor, but slices of a "
                f"batch have lengths of their own; compute them from the batch, or {REMEDY}"
            )
    arguments = (log_probs, targets, input_lengths, target_lengths)
    settings = (blank, zero_infinity, torch.backends.cudnn.enabled)
    losses = call_opaquely(table, _losses, (*arguments, *settings), name="ctc_loss")
    if reduction == "sum":
        return losses.sum()
    if reduction == "mean":
        # ATen/native/LossCTC.cpp counts empty targets as one word.
        return (losses / target_lengths.to(losses).clamp_min(1)).mean()
    return losses


def _losses(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
    with_cudnn: bool,
) -> torch.Tensor:
    """One loss for each sample; for tensors without values, an empty tensor of that shape."""
    if isinstance(log_probs, FakeTensor) or log_probs.is_meta:
        return log_probs.sum((0, -1))
    with torch.backends.cudnn.flags(enabled=with_cudnn):
        return functional.ctc_loss(
            log_probs, targets, input_lengths, target_lengths, blank, "none", zero_infinity
        )


_LIBRARY = torch.library.Library("penstock", "FRAGMENT")
_LIBRARY.define("data(Tensor(a) tensor) -> Tensor(a)")


def _data(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.data


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.alias.default(tensor)


_LIBRARY.impl("data", _data, "Autograd")
_LIBRARY.impl("data", _alias, "CompositeExplicitAutograd")

_OF_A_TENSOR: Any = torch.Tensor.data


class KeepData(TorchCalls):
    """Records each ``.data`` as an operator."""

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func``, or the operator that replaces it."""
        if func == _OF_A_TENSOR.__get__:
            return torch.ops.penstock.data(args[0])
        if func == _OF_A_TENSOR.__set__:
            tensor, value = args
            if tensor.dtype != value.dtype or not same_shape(tensor, value):
                raise CaptureFailed(
                    f"forward gives .data another type or shape at {current_line()}, which a "
                    f"captured model cannot follow; make a new tensor, or {REMEDY}"
                )
            return torch.ops.penstock.data(tensor).copy_(value.detach())
        return func(*args, **kwargs)


@contextlib.contextmanager
def modules_stay() -> Iterator[None]:
    """Within, modules may be moved or cast only to the device and type that they already have.

    Raises:
        CaptureFailed: a parameter or buffer would change; names the line.
    """

    def apply(self: nn.Module, function: Callable[..., Any], recurse: bool = True) -> nn.Module:
        tensors = [*self.parameters(recurse), *self.buffers(recurse)]
        if not all(_stays(tensor, function) for tensor in tensors):
            why = "changes the type or the device of parameters in forward"
            raise refused(f"{type(self).__name__}.to", why)
        return self

    with replaced(nn.Module, "_apply", apply):
        yield


def _stays(tensor: torch.Tensor, function: Callable[..., Any]) -> bool:
    """Whether ``function`` returns a tensor like this one unchanged."""
    with disable_proxy_modes_tracing(), unset_fake_temporarily(), torch._C.DisableTorchFunction():
        like = torch.empty((0,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device)
        return function(like) is like
