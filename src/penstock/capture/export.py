"""Tracing with ``torch.export``: one symbolic number of samples, training mode, nothing changed."""

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.exc import UserError
from torch.export import Dim
from torch.fx.experimental import _config

from penstock.capture.as_trained import as_trained
from penstock.capture.asked import DataDependence, NotKept, asked_values
from penstock.capture.batch_layout import BatchLayout
from penstock.capture.block_calls import BlockCalls
from penstock.capture.block_copies import copy_blocks
from penstock.capture.called_by_name import Callee, callees_at, replaced_callees
from penstock.capture.capture_errors import (
    GoesByValues,
    capture_failed,
    data_dependent,
    fixes_samples,
)
from penstock.capture.chance import refusing_chance
from penstock.capture.ctc import KeepCtc
from penstock.capture.custom_functions import keeping_custom_functions
from penstock.capture.data_attribute import KeepData
from penstock.capture.guards import guards_in, hold_for_all_rows
from penstock.capture.hooks import check_hooks, keeping_hooks
from penstock.capture.kept_calls import KeptCalls
from penstock.capture.kept_modules import OwnOperators, keeping_modules
from penstock.capture.length_conditions import LEAVES
from penstock.capture.loss_module import LossModule
from penstock.capture.moved_modules import modules_stay
from penstock.capture.opaque import (
    OpaqueTable,
    keep_opaque_calls,
    recording_opaque_calls,
    refused_at,
)
from penstock.capture.python_state import StateChange, check_changes, kept_python_state
from penstock.capture.recorded_values import replaying
from penstock.capture.sample_lists import symbolic_samples
from penstock.capture.sample_pieces import NotJoined, listing_sizes
from penstock.errors import PenstockError

__all__ = ["export_module", "home_device"]

LEAST_TRACED_ROWS = 2
"""Tracing takes sizes 0 and 1 for constants."""

MOST_ROWS = 1 << 31
"""A bound, so that torch's own ranges of sizes, which are rounded, stay within whole numbers."""


def home_device(module: nn.Module) -> torch.device:
    """The device of the module's tensors: meta if any is there, else that of the first."""
    devices = [t.device for t in (*module.parameters(), *module.buffers())]
    if any(device.type == "meta" for device in devices):
        return torch.device("meta")
    return devices[0] if devices else torch.device("cpu")


def export_module(
    module: LossModule,
    leaves: Sequence[torch.Tensor],
    layout: BatchLayout,
    *,
    reuse_blocks: bool = True,
) -> fx.GraphModule:
    """The operators of ``module`` on ``leaves``, in training mode, for any number of rows.

    The dimensions that ``layout`` declares to vary are symbolic, too; what the code takes for
    granted of them is in the guards of the result. Module flags, buffers and random state are as
    before afterwards. With ``reuse_blocks``, blocks that do the same are traced twice and then
    copied (`block_calls`), which gives the same graph.

    Raises:
        CaptureFailed: the code cannot be traced, or only for one number of rows, or one length.
    """
    check_hooks(module.model)
    home = home_device(module)
    example = tuple(_enough_rows(leaf.detach().to(home)) for leaf in leaves)
    rows = Dim("rows", min=LEAST_TRACED_ROWS, max=MOST_ROWS)
    # Not named as the rows are: named ones would have to be traced again for every limit found.
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
            traced = _traced(module, example, shapes, table, reuse_blocks, printed)
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
        raise capture_failed(error, type(module.model).__name__, names) from error
    return traced


@dataclass(frozen=True)
class _Aids:
    """What tracing a model turned out to need.

    ``asked`` is what its code asks for (None: not looked for); at the lines ``not_joined`` it does
    more with lists of sizes than divide tensors. The functions ``wanted`` go by values, and are
    kept whole. So are modules of the classes ``kept``, which have long loops; those of
    ``written_out`` never.
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
    reuse_blocks: bool,
    printed: io.StringIO,
) -> fx.GraphModule:
    """The operators of ``module``, traced again with each aid that it turns out to need.

    What was printed in a trace that failed is taken out of ``printed``.
    """
    aids = _Aids()
    while True:
        operators = OwnOperators(module.model, aids.kept | aids.written_out)
        refused: list[type[nn.Module]] = []
        changes: list[StateChange] = []
        asked = DataDependence() if aids.asked is None else aids.asked
        calls = KeptCalls(asked.kept, table, lambda: module.samples)
        module.inside = partial(_inside, table, operators, aids, calls)
        try:
            with (
                keeping_modules(module.model, aids.kept, table, refused),
                replaced_callees(module.model, calls.callees, calls.wrap),
            ):
                # Code that asks for values must ask in the order in which they were recorded.
                if reuse_blocks and aids.asked is None:
                    traced = _with_copied_blocks(module, example, shapes, table, changes)
                else:
                    traced = _exported(module, example, shapes, changes)
            module.inside = contextlib.nullcontext
            check_changes(changes, module, example)
            return traced
        except Exception as error:
            printed.seek(0)
            printed.truncate()
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
    table: OpaqueTable, operators: OwnOperators, aids: _Aids, calls: KeptCalls
) -> Iterator[None]:
    """Where the code of the model runs while it is traced."""
    calls.restart()
    with contextlib.ExitStack() as modes:
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
    """The aids with what code asks for of tensors, or with a function that goes by values.

    Raises:
        Exception: ``error``, or a better one, where neither helps.
    """
    if isinstance(error, NotJoined):
        aids = replace(aids, asked=None, not_joined=aids.not_joined | {error.line})
    told = isinstance(error, PenstockError) and not isinstance(error, NotJoined)
    if aids.asked is None and not told:
        try:
            asked = _asked(module, example, aids)
        except GoesByValues as found:
            error = found
        else:
            if asked or fixes_samples(error):
                return replace(aids, asked=asked)
    by_values = isinstance(error, GoesByValues) or data_dependent(error)
    # Python code may also stumble over what stands for the samples.
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
    """What the code asks for; nothing where it cannot run, or on meta, where nothing has values."""
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
    """The operators of ``module``; ``changes`` gets what its code has changed in Python."""
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


def _with_copied_blocks(
    module: LossModule,
    example: tuple[torch.Tensor, ...],
    shapes: Any,
    table: OpaqueTable,
    changes: list[StateChange],
) -> fx.GraphModule:
    """What `_exported` gives, though only two blocks are run of those that do the same.

    Classes of blocks that only seemed to do the same are run, all of them, in another trace.
    """
    apart: frozenset[type] = frozenset()
    while True:
        calls = BlockCalls(module, apart)
        with calls.noted():
            traced = _exported(module, example, shapes, changes)
        unlike = copy_blocks(traced, module, calls, table)
        if not unlike:
            return traced
        apart |= unlike


def _enough_rows(leaf: torch.Tensor) -> torch.Tensor:
    repeats = -(-LEAST_TRACED_ROWS // leaf.shape[0])
    return torch.cat([leaf] * repeats) if repeats > 1 else leaf


@contextlib.contextmanager
def _without_logs() -> Iterator[io.StringIO]:
    """No pages of traces on standard error: what went wrong is told by one exception."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), warnings.catch_warnings():
            # Told by `check_changes`, where it matters.
            warnings.filterwarnings("ignore", message=r"The tensor attributes? ")
            # Tensors of the trace, which torch looks through where it failed.
            warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor")
            yield printed
        sys.stderr.write(printed.getvalue())
    finally:
        logging.disable(before)
