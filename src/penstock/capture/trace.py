"""From a model and one example batch to its layer graph."""

from typing import Literal

from torch import nn

from penstock.capture.chain import Chain
from penstock.capture.chain_graph import chain_graph
from penstock.capture.layer_graph import Batch, LayerGraph, LossFunction
from penstock.errors import CaptureFailed

__all__ = ["Granularity", "capture_model"]

Granularity = Literal["block", "module", "operator"]


def capture_model(
    model: nn.Module,
    batch: Batch,
    *,
    loss: LossFunction | None = None,
    granularity: Granularity = "module",
) -> LayerGraph:
    """The layers of ``model`` with its loss, and the tensors between them.

    Raises:
        BadInput: the batch does not fit the model, or no scalar loss comes out.
        CaptureFailed: the model cannot be traced; names the line, and the way out.
    """
    if isinstance(model, Chain):
        return chain_graph(model, batch, loss=loss)
    raise CaptureFailed("tracing is not built yet; pass a penstock.Chain([...])")
