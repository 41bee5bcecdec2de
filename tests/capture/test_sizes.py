"""What the code of a model computes from the number of samples, and how often it is traced."""

import pytest
import torch
from torch import nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.functional import mse_loss, pad

from penstock.capture import trace
from penstock.capture.trace import capture_model
from penstock.errors import CaptureFailed


class _Sized(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)


class NumberOfColumns(_Sized):
    """A size made from the samples that does not depend on them: rows * 6 // rows."""

    def forward(self, values, others):
        hidden = self.first(values)
        columns = hidden.numel() // others.shape[0]
        return self.last(hidden * hidden.new_ones(columns))


class AtMostTwo(_Sized):
    def forward(self, values, others):
        hidden = self.first(values)
        few = torch.sym_min(hidden.shape[0], 2)
        return self.last(hidden) * few


class AtLeastThree(_Sized):
    def forward(self, values, others):
        hidden = self.first(values)
        many = torch.sym_max(hidden.shape[0], 3)
        return self.last(hidden) * torch.ones(many, dtype=hidden.dtype).sum()


class LeavesTorch(_Sized):
    def forward(self, values):
        return self.last(self.first(torch.from_numpy(values.numpy() + 1)))


class AlwaysFour(_Sized):
    """A condition that holds for any number of samples, which tracing cannot prove."""

    def forward(self, values, others):
        rows = values.shape[0]
        assert rows * torch.sym_min(4, 8 * rows) == 4 * rows
        return self.last(self.first(values))


class AtMostFive(_Sized):
    def forward(self, values, others):
        rows = values.shape[0]
        assert rows * torch.sym_min(5, rows) == rows * rows
        return self.last(self.first(values))


class StartsOfSamples(_Sized):
    """Sizes of rows - 1, of which torch asks whether they are one."""

    def forward(self, values, others):
        ends = values.abs().sum(1).cumsum(0)
        starts = torch.repeat_interleave(pad(ends[:-1], (1, 0)), 1 + 0 * ends.long())
        return self.last(self.first(values) * starts[:, None])


class LooksUpInAMap(_Sized):
    """What the mask code of Hugging Face does: look-ups in a mapped function."""

    def forward(self, values, others):
        hidden = self.first(values)
        kinds = (values > 0).long()

        def kind(row, column):
            return kinds[row, column]

        with TransformGetItemToIndex():
            over_columns = torch.vmap(kind, in_dims=(None, 0))
            over_both = torch.vmap(over_columns, in_dims=(0, None))
            found = over_both(torch.arange(values.shape[0]), torch.arange(4))
        return self.last(hidden) * found.to(hidden.dtype).mean(1, keepdim=True)


@pytest.mark.parametrize(
    "kind",
    [NumberOfColumns, AtMostTwo, AtLeastThree, AlwaysFour, StartsOfSamples, LooksUpInAMap],
)
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_stage_computes_sizes_for_its_own_rows(pipeline, kind, rows):
    model, loss = kind().double(), mse_loss
    batch = tuple(torch.randn(6, columns, dtype=torch.float64) for columns in (4, 4, 3))
    graph = capture_model(model, batch, loss=loss)
    assert graph.layer_names == ("first", "last", "loss")
    pipeline.assert_composition_equals_model(graph, model, batch, [1, 2], loss=loss, rows=rows)


def test_a_model_whose_own_code_cannot_be_traced_is_traced_once(monkeypatch):
    traced = []

    def counted(*arguments, **options):
        traced.append(arguments)
        return trace_once(*arguments, **options)

    trace_once = trace.export_module
    monkeypatch.setattr(trace, "export_module", counted)
    with pytest.raises(CaptureFailed, match="numpy"):
        capture_model(LeavesTorch(), (torch.randn(4, 4), torch.randn(4, 3)), loss=mse_loss)
    assert len(traced) == 1


def test_a_condition_that_does_not_hold_for_all_numbers_of_samples_is_named():
    batch = tuple(torch.randn(4, columns) for columns in (4, 4, 3))
    with pytest.raises(CaptureFailed) as caught:
        capture_model(AtMostFive(), batch, loss=mse_loss)
    message = str(caught.value)
    assert "holds only for numbers of samples with" in message
    assert "min(5, rows)" in message
    assert "penstock.Chain" in message
    assert "\n" not in message
