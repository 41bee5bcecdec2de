"""Python code that asks for values: the example's branch is taken, and checked in the stages."""

import pytest
import torch
from plain_training import assert_pipeline_equals_plain
from torch import nn
from torch.nn import functional

from penstock.capture.trace import capture_model
from penstock.errors import CaptureFailed, RunFailed


class _Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 6)
        self.third = nn.Linear(6, 5)

    def hidden(self, values):
        return torch.tanh(self.second(torch.tanh(self.first(values))))

    def forward(self, values):
        return self.third(self.hidden(values))


def _line(function, offset):
    return f"{__file__}:{function.__code__.co_firstlineno + offset} `"


def _batch(rows=4):
    return torch.rand(rows, 4, dtype=torch.float64) + 0.5, torch.arange(rows) % 5


class BranchesOnInputs(_Layers):
    def forward(self, values):
        if values.min() < 0:
            raise ValueError("negative values")
        return super().forward(values)


class BranchesOnHidden(_Layers):
    def forward(self, values):
        hidden = self.hidden(values)
        assert hidden.abs().max() < 1
        if torch.isfinite(hidden).all():
            hidden = hidden * 2
        return self.third(hidden)


class ScalesByAnItem(_Layers):
    def forward(self, values):
        step = values.flatten().new_tensor(3.0) * 2
        return super().forward(values) * (step.item() if step.item() > 5 else 1.0)


class ComparesACount(_Layers):
    def forward(self, values):
        if values.gt(0).sum().item() == values.shape[0] * 4:
            return super().forward(values)
        return super().forward(-values)


class AsksForLists(_Layers):
    def forward(self, values):
        low, high = torch.stack([values.amin().floor(), values.amax().ceil()]).tolist()
        assert low < high
        return super().forward((values - low) / (high - low))


class ComparesTensors(_Layers):
    def forward(self, values):
        if torch.equal(values, values.abs()) and 100.0 not in values:
            return super().forward(values)
        return super().forward(values) * 3


MODELS = [BranchesOnInputs, BranchesOnHidden, ScalesByAnItem, ComparesACount, ComparesTensors]


@pytest.mark.parametrize("model", [*MODELS, AsksForLists], ids=lambda kind: kind.__name__)
def test_loss_and_gradients_are_those_of_the_branch_that_the_example_takes(model):
    batch = _batch()
    batch[0][:, 0], batch[0][:, 1] = 0.5, 1.5
    assert_pipeline_equals_plain(model().double(), batch, loss=functional.cross_entropy)


@pytest.mark.parametrize(
    ("model", "offset"),
    [(BranchesOnInputs, 1), (ComparesACount, 1), (ComparesTensors, 1)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_batch_that_takes_another_branch_stops_the_stage_and_names_the_line(
    pipeline, model, offset
):
    graph = capture_model(model().double(), _batch(), loss=functional.cross_entropy)
    programs = pipeline.split(graph, [1, 2])
    pipeline.run_programs(graph, programs, _batch(6))
    values, targets = _batch()
    values[2, 1] = -1.0
    with pytest.raises(RunFailed) as caught:
        pipeline.run_programs(graph, programs, (values, targets))
    message = str(caught.value)
    assert _line(model.forward, offset) in message
    assert "branches" in message
    assert "torch.where" in message
    assert "\n" not in message


def test_a_number_that_another_batch_changes_stops_the_stage_and_is_told(pipeline):
    values, targets = _batch()
    values[:, 0], values[:, 1] = 0.5, 1.5
    graph = capture_model(AsksForLists().double(), (values, targets), loss=functional.cross_entropy)
    values[3, 2] = 7.5
    with pytest.raises(RunFailed, match=r"finds 8\.0, not 2\.0, at .*test_recorded_values\.py"):
        pipeline.run_programs(graph, pipeline.split(graph, [2]), (values, targets))


def test_checks_cost_no_layer_and_send_nothing(pipeline):
    plain = capture_model(_Layers().double(), _batch(), loss=functional.cross_entropy)
    checked = capture_model(BranchesOnHidden().double(), _batch(), loss=functional.cross_entropy)
    assert checked.layer_names == plain.layer_names
    assert [spec.shape for spec, _, _ in checked.crossings] == [
        spec.shape for spec, _, _ in plain.crossings
    ]


class BranchesOnTheSum(_Layers):
    def forward(self, values):
        if values.sum() > 0:
            return super().forward(values)
        return super().forward(values) * 2


def test_a_branch_that_half_of_the_example_takes_otherwise_is_refused_at_capture():
    values, targets = _batch()
    values[:2] *= -0.1
    with pytest.raises(CaptureFailed) as caught:
        capture_model(BranchesOnTheSum().double(), (values, targets), loss=functional.cross_entropy)
    assert _line(BranchesOnTheSum.forward, 1) in str(caught.value)
    assert "half of the example batch" in str(caught.value)


class ScalesByTheSum(_Layers):
    def forward(self, values):
        total = values.sum().item()
        return super().forward(values) * max(total, 1.0)


class BranchesForEachSample(_Layers):
    def forward(self, values):
        return super().forward(torch.stack([v if v.sum() > 0 else -v for v in values.unbind()]))


class ListsASampleEach(_Layers):
    def forward(self, values):
        highest = max(values.sum(1).tolist())
        assert values.max() < 9
        return super().forward(values) * highest


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (ScalesByTheSum, "a number .* that other batches change"),
        (BranchesForEachSample, "sample by sample"),
        (ListsASampleEach, "sample by sample"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_values_that_depend_on_the_slice_are_refused_with_the_line(model, words):
    with pytest.raises(CaptureFailed, match=words) as caught:
        capture_model(model().double(), _batch(), loss=functional.cross_entropy)
    assert _line(model.forward, 1) in str(caught.value)
    assert "\n" not in str(caught.value)


class Counts(BranchesOnInputs):
    def __init__(self):
        super().__init__()
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, values):
        self.runs += 1
        return super().forward(functional.dropout(values, 0.5))


def test_asking_for_values_changes_neither_buffers_nor_random_state():
    model, batch = Counts().double(), _batch()
    state = torch.get_rng_state()
    capture_model(model, batch, loss=functional.cross_entropy)
    assert model.runs == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_a_branch_on_meta_is_refused_with_its_line():
    with torch.device("meta"):
        model = BranchesOnInputs()
    with pytest.raises(CaptureFailed) as caught:
        capture_model(model, (torch.rand(4, 4), torch.arange(4)), loss=functional.cross_entropy)
    assert _line(BranchesOnInputs.forward, 1) in str(caught.value)


class ChecksLabels(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = _Layers()

    def forward(self, values, labels):
        if values.min() < 0:
            raise ValueError("negative values")
        if labels.max() >= 5:
            raise ValueError("no such class")
        scores = self.layers(values)
        return {"loss": functional.cross_entropy(scores, labels), "scores": scores}


def test_predictions_check_the_inputs_but_need_no_labels():
    values, labels = _batch()
    graph = capture_model(ChecksLabels().double(), {"values": values, "labels": labels})
    predicting = graph.without_loss()
    module = predicting.stage(range(len(predicting.layer_names))).module
    (leaf,) = predicting.known_leaves({"values": values}).values()
    (scores,) = module(leaf)
    assert scores.shape == (4, 5)
    with pytest.raises(RunFailed, match="branches"):
        module(-leaf)


class InRegion(nn.Module):
    """Decides by values where gradients, or autocast, are off."""

    def __init__(self, region):
        super().__init__()
        self.layer, self.region = nn.Linear(4, 3), region

    def forward(self, values, flag):
        with self.region():
            scale = 2.0 if flag.any() else 1.0
        return self.layer(values) * scale


class Asserts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, values, flag):
        torch._assert_async(flag.all(), "a flag is down")
        return self.layer(values)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (InRegion(torch.no_grad), "the model branches at "),
        (InRegion(lambda: torch.set_grad_enabled(False)), "the model branches at "),
        (InRegion(lambda: torch.autocast("cpu", enabled=False)), "the model branches at "),
        (Asserts(), "a flag is down"),
    ],
    ids=["no_grad", "set_grad_enabled", "autocast off", "_assert_async"],
)
def test_a_check_that_nothing_else_needs_runs_and_leaves_gradients_on(model, words):
    batch = (torch.randn(4, 4), torch.ones(4, dtype=torch.bool), torch.arange(4) % 3)
    graph = capture_model(model, batch, loss=torch.nn.functional.cross_entropy)
    stage = graph.stage(range(len(graph.layer_names))).module
    stage(*batch)
    with pytest.raises((RunFailed, RuntimeError), match=words):
        stage(batch[0], ~batch[1], batch[2])
    assert torch.is_grad_enabled()


def test_a_refusal_within_a_region_leaves_gradients_on():
    class Uses(InRegion):
        def forward(self, values, flag):
            hidden = self.layer(values)
            with torch.no_grad():
                scale = (2.0 if flag.any() else 1.0) + 0 * hidden.sum()
            return hidden * scale

    batch = (torch.randn(4, 4), torch.ones(4, dtype=torch.bool), torch.arange(4) % 3)
    graph = capture_model(Uses(None), batch, loss=torch.nn.functional.cross_entropy)
    stage = graph.stage(range(len(graph.layer_names))).module
    with pytest.raises(RunFailed, match="the model branches at "):
        stage(batch[0], ~batch[1], batch[2])
    assert torch.is_grad_enabled()
