"""Tracing with ``torch.export``: one symbolic number of samples, training mode, nothing changed."""

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.exc import UserError
from torch.export import Dim

from penstock.capture.as_trained import as_trained
from penstock.capture.batch_layout import BatchLayout
from penstock.capture.capture_errors import capture_failed, fixes_samples
from penstock.capture.ctc import KeepCtc
from penstock.capture.custom_functions import keeping_custom_functions
from penstock.capture.guards import hold_for_all_rows
from penstock.capture.hooks import check_hooks, keeping_hooks
from penstock.capture.length_conditions import LEAVES
from penstock.capture.loss_module import LossModule
from penstock.capture.opaque import OpaqueTable, keep_opaque_calls, recording_opaque_calls
from penstock.capture.recorded_values import RecordedValue, asked_values, replaying
from penstock.capture.sample_lists import symbolic_samples
from penstock.errors import PenstockError

__all__ = ["export_module", "home_device"]

LEAST_TRACED_ROWS = 2
"""Tracing takes sizes 0 and 1 for constants."""


def home_device(module: nn.Module) -> torch.device:
    """The device of the module's tensors: meta if any is there, else that of the first."""
    devices = [t.device for t in (*module.parameters(), *module.buffers())]
    if any(device.type == "meta" for device in devices):
        return torch.device("meta")
    return devices[0] if devices else torch.device("cpu")


def export_module(
    module: LossModule, leaves: Sequence[torch.Tensor], layout: BatchLayout
) -> fx.GraphModule:
    """The operators of ``module`` on ``leaves``, in training mode, for any number of rows.

    The dimensions that ``layout`` declares to vary are symbolic, too; what the code takes for
    granted of them is in the guards of the result. Module flags, buffers and random state are as
    before afterwards.

    Raises:
        CaptureFailed: the code cannot be traced, or only for one number of rows, or one length.
    """
    check_hooks(module.model)
    home = home_device(module)
    example = tuple(_enough_rows(leaf.detach().to(home)) for leaf in leaves)
    rows = Dim("rows", min=LEAST_TRACED_ROWS)
    # Not named as the rows are: named ones would have to be traced again for every limit found.
    shapes = (
        tuple({0: rows} | {dim: Dim.DYNAMIC for dim, _ in leaf.varying} for leaf in layout.leaves),
    )
    try:
        with (
            as_trained(module, module.model),
            _without_logs(),
            torch.random.fork_rng(devices=[]),
            recording_opaque_calls() as table,
            keeping_custom_functions(table),
            keeping_hooks(table),
        ):
            traced = _traced(module, example, shapes, table)
            assert isinstance(traced, fx.GraphModule)
            keep_opaque_calls(traced, table)
    except PenstockError:
        raise
    except Exception as error:
        names = {
            f"['{LEAVES}'][{number}].size()[{dim}]": layout.lengths[length].name
            for number, leaf in enumerate(layout.leaves)
            for dim, length in leaf.varying
        }
        raise capture_failed(error, type(module.model).__name__, names) from error
    return traced


def _traced(
    module: LossModule, example: tuple[torch.Tensor, ...], shapes: Any, table: OpaqueTable
) -> nn.Module:
    """The operators; where the code asks for values, those of the example, under assertions."""
    try:
        return _exported(module, example, shapes, lambda: KeepCtc(table))
    except PenstockError:
        raise
    except Exception as error:
        asked = _asked(module, example)
        if not asked and not fixes_samples(error):
            raise

    @contextlib.contextmanager
    def inside() -> Iterator[None]:
        with KeepCtc(table), symbolic_samples(), replaying(asked):
            yield

    return _exported(module, example, shapes, inside)


def _asked(module: LossModule, example: Sequence[torch.Tensor]) -> tuple[RecordedValue, ...]:
    """What the code asks for; nothing where it cannot run, or on meta, where nothing has values."""
    if home_device(module).type == "meta":
        return ()
    try:
        return asked_values(module, example)
    except PenstockError:
        raise
    except Exception:
        return ()


def _exported(
    module: LossModule,
    example: tuple[torch.Tensor, ...],
    shapes: Any,
    inside: Callable[[], contextlib.AbstractContextManager[Any]],
) -> nn.Module:
    """The operators of ``module`` as it runs in a context of ``inside``."""
    module.inside = inside
    export = partial(torch.export.export, module, example, dynamic_shapes=shapes, strict=False)
    try:
        return export().module()
    except UserError as error:
        if not hold_for_all_rows(error):
            raise
        return export(prefer_deferred_runtime_asserts_over_guards=True).module()
    finally:
        module.inside = contextlib.nullcontext


def _enough_rows(leaf: torch.Tensor) -> torch.Tensor:
    repeats = -(-LEAST_TRACED_ROWS // leaf.shape[0])
    return torch.cat([leaf] * repeats) if repeats > 1 else leaf


@contextlib.contextmanager
def _without_logs() -> Iterator[None]:
    """No pages of traces on standard error: what went wrong is told by one exception."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), warnings.catch_warnings():
            # Recurrent modules keep a list of their own parameters; torch calls it an attribute.
            warnings.filterwarnings("ignore", message=r"The tensor attributes? .*_flat_weights")
            yield
        sys.stderr.write(printed.getvalue())
    finally:
        logging.disable(before)
