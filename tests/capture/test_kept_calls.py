"""Python code that goes through the samples is kept whole: functions, methods, modules."""

from typing import Any

import pytest
import torch
from plain_training import assert_pipeline_equals_plain
from torch import nn
from torch.nn import functional

from penstock.capture.evaluation import set_training
from penstock.capture.trace import capture_model
from penstock.errors import BadInput, CaptureFailed, RunFailed
from penstock.measure.layer_times import measure_profile
from penstock.measure.roofline import estimate_profile

PATCHES, WIDTH = 8, 6


def places_of(grid):
    """Row and column of every patch; each sample's picture has a grid of its own."""
    found = []
    for high, wide in grid.tolist():
        rows = torch.arange(high).repeat_interleave(wide)
        found.append(torch.stack([rows, torch.arange(wide).repeat(high)], dim=1))
    return torch.cat(found)


class SampleAttention(nn.Module):
    """Attention among the patches of each picture, one picture after the other."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, hidden, bounds):
        lengths = (bounds[1:] - bounds[:-1]).tolist()
        parts = torch.split(self.first(hidden), lengths)
        return torch.cat([(part @ part.T * self.scale).softmax(-1) @ part for part in parts])


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Linear(4, WIDTH)
        self.place = nn.Embedding(PATCHES * 2, WIDTH)
        self.blocks = nn.ModuleList([SampleAttention(), SampleAttention()])
        self.head = nn.Linear(WIDTH, 3)

    def divided(self, hidden, grid):
        """The patches of each picture."""
        return torch.split(hidden, grid.prod(1).tolist())

    def pooled(self, hidden, grid):
        """The mean of each picture's patches."""
        pieces = self.divided(hidden, grid)
        joined = torch.cat(
            [piece.reshape(-1, piece.shape[-1]).to(hidden.dtype) for piece in pieces]
        )
        return joined.view(len(pieces), PATCHES, WIDTH).mean(1)

    def forward(self, patches, grid):
        places = places_of(grid)
        hidden = self.patch(patches) + self.place(places[:, 0] * 2 + places[:, 1] % 2)
        bounds = functional.pad(grid.prod(1).cumsum(0), (1, 0))
        for block in self.blocks:
            hidden = hidden + block(hidden, bounds)
        return self.head(self.pooled(hidden, grid))


GRIDS = [(2, 4), (4, 2), (1, 8), (8, 1), (2, 4), (4, 2)]


def _batch(samples=4) -> tuple[torch.Tensor, ...]:
    patches = torch.randn(samples * PATCHES, 4, dtype=torch.float64)
    return patches, torch.tensor(GRIDS[:samples]), torch.arange(samples) % 3


def _kept(graph: Any) -> int:
    return sum("run_opaque" in str(node.target) for node in graph.flow.clean.graph.nodes)


@pytest.mark.parametrize("options", [{}, {"micro_batches": 4}, {"recompute": True}])
def test_loss_and_gradients_are_those_of_the_plain_model(options):
    graph = assert_pipeline_equals_plain(
        Pictures().double(), _batch(), loss=functional.cross_entropy, **options
    )
    # The places, and the attention of two blocks.
    assert _kept(graph) == 3
    assert graph.layer_names == ("patch", "place", "blocks.0", "blocks.1", "head", "loss")


def test_stages_run_for_any_number_of_samples_and_share_the_parameters(pipeline):
    model = Pictures().double()
    graph = capture_model(model, _batch(), loss=functional.cross_entropy)
    for rows in (1, 3, 6):
        pipeline.assert_composition_equals_model(
            graph, model, _batch(rows), [1, 3, 5], loss=functional.cross_entropy
        )
    held = dict(graph.stage(range(2, 3)).module.named_parameters())
    assert set(held) == {"blocks.0.first.weight", "blocks.0.first.bias"}
    assert held["blocks.0.first.weight"] is model.blocks[0].first.weight


def test_predictions_are_those_of_the_model_in_evaluation_mode():
    model = Pictures().double()
    predicting = capture_model(model, _batch(), loss=functional.cross_entropy).without_loss()
    module = predicting.stage(range(len(predicting.layer_names))).module
    set_training(module, False)
    patches, grid, _ = _batch(5)
    leaves = predicting.known_leaves((patches, grid))
    torch.testing.assert_close(module(*leaves.values())[0], model.eval()(patches, grid))


def test_its_costs_are_measured_but_not_estimated_from_shapes():
    graph = capture_model(Pictures().double(), _batch(), loss=functional.cross_entropy)
    profile = measure_profile(graph, _batch(), repeats=1)
    assert [layer.name for layer in profile.layers] == list(graph.layer_names)
    with pytest.raises(BadInput, match=r"SampleAttention\.forward costs .*\.tolist\(\).*measure"):
        estimate_profile(graph, _batch(), "H100-80GB")


def test_names_are_as_before_afterwards():
    before, model = places_of, Pictures().double()
    capture_model(model, _batch(), loss=functional.cross_entropy)
    assert places_of is before
    assert "forward" not in vars(model.blocks[0])


def test_a_batch_whose_samples_have_more_stops_the_stage_and_names_the_line(pipeline):
    graph = capture_model(Pictures().double(), _batch(), loss=functional.cross_entropy)
    patches, grid, targets = _batch()
    grid[1] = torch.tensor([4, 4])
    with pytest.raises(RunFailed) as caught:
        pipeline.run_programs(graph, pipeline.split(graph, [2]), (patches, grid, targets))
    message = str(caught.value)
    assert message.startswith("places_of returned [(40, 2)] for 4 samples, which is not what")
    assert "`for high, wide in grid.tolist():`" in message
    assert "\n" not in message


class Watched(nn.Module):
    """Layers around code of which a test says what it does sample by sample."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 6)
        self.third = nn.Linear(6, 3)
        self.count = nn.Linear(1, 1)
        self.seen = 0.0

    def forward(self, values):
        hidden = torch.tanh(self.second(torch.tanh(self.first(values))))
        return self.third(hidden * self.factors(values, hidden)[:, None])

    def factors(self, values, hidden):
        raise NotImplementedError


class ClampsEachSample(Watched):
    def factors(self, values, hidden):
        return torch.stack([min(float(v.sum()), 2.0) * v.mean() for v in values.unbind()])


class TrainsAParameter(Watched):
    def factors(self, values, hidden):
        return torch.cat([self.count(v.sum().view(1)) * int(v.sum() > 2) for v in values])


class DrawsNumbers(Watched):
    def factors(self, values, hidden):
        return torch.stack([functional.dropout(v, 0.5).sum() * int(v.sum() > 2) for v in values])


class ComparesSamples(Watched):
    def factors(self, values, hidden):
        largest = max(float(v.sum()) for v in values)
        return values.sum(1) / largest


def _values():
    values = torch.rand(4, 4, dtype=torch.float64) - 0.2
    values[:2] -= 1.0
    values[2:] += 3.0
    return values, torch.arange(4) % 3


@pytest.mark.parametrize("kind", [ClampsEachSample, TrainsAParameter])
def test_methods_are_kept_with_their_branches_and_parameters(kind):
    graph = assert_pipeline_equals_plain(kind().double(), _values(), loss=functional.cross_entropy)
    assert _kept(graph) == 1
    assert graph.mixing == ""


def test_a_kept_call_in_which_samples_act_on_one_another_sees_a_micro_batch():
    graph = assert_pipeline_equals_plain(
        ComparesSamples().double(), _values(), loss=functional.cross_entropy, per_micro_batch=True
    )
    assert graph.mixing == "it mixes samples (call of 'ComparesSamples.factors')"


def test_a_kept_call_that_draws_numbers_is_run_once_by_one_layer():
    graph: Any = capture_model(DrawsNumbers().double(), _values(), loss=functional.cross_entropy)
    (kept,) = [n for n in graph.flow.clean.graph.nodes if "run_opaque" in str(n.target)]
    assert kept in graph.flow.position


class ReadsFromElsewhere(Watched):
    def forward(self, values):
        hidden = torch.tanh(self.second(torch.tanh(self.first(values))))

        self.hold = [hidden]
        found = self.third(hidden * self.factors(values, None)[:, None])
        self.hold.clear()
        return found

    def factors(self, values, hidden):
        (hidden,) = self.hold
        return torch.stack([v.sum() * float(h.sum()) for v, h in zip(values, hidden, strict=True)])


class LeavesSomething(Watched):
    def factors(self, values, hidden):
        self.seen = torch.stack([v.sum() * int(v.sum() > 2) for v in values])
        return self.seen


class ReturnsAList(Watched):
    def forward(self, values):
        hidden = torch.tanh(self.second(torch.tanh(self.first(values))))
        return self.third(hidden * torch.tensor(self.factors(values, hidden))[:, None])

    def factors(self, values, hidden):
        return [float(v.sum()) for v in values]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (ReadsFromElsewhere, "reads a tensor of the model that is not among its arguments"),
        (LeavesSomething, "changes its arguments, or attributes of its module"),
        (ReturnsAList, "returns something else for each number of samples"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_line_and_why(kind, why):
    with pytest.raises(CaptureFailed) as caught:
        capture_model(kind().double(), _values(), loss=functional.cross_entropy)
    message = str(caught.value)
    assert "test_kept_calls.py:" in message
    assert f"({kind.__name__}.factors around it cannot be kept whole: it {why})" in message
    assert "\n" not in message


class ComparesItsSizes(Pictures):
    """A list of sizes that is not only there to divide: one of the reasons to keep more whole."""

    def divided(self, hidden, grid):
        sizes = grid.prod(1).tolist()
        assert sizes == [PATCHES] * len(sizes)
        return torch.split(hidden, sizes)


def test_a_list_of_sizes_that_is_looked_at_does_not_only_divide_a_tensor():
    graph = assert_pipeline_equals_plain(
        ComparesItsSizes().double(), _batch(), loss=functional.cross_entropy
    )
    # `pooled` instead of what it calls.
    assert _kept(graph) == 4


class Inside(nn.Module):
    """All of a model but its last layer."""

    def __init__(self):
        super().__init__()
        self.model = nn.ModuleDict({"part": ReturnsAList()})
        self.last = nn.Linear(3, 3)

    def forward(self, values):
        return self.last(self.model["part"](values))


def test_what_holds_most_of_the_model_is_not_kept_whole():
    with pytest.raises(CaptureFailed, match="it reads most of the model's parameters"):
        capture_model(Inside().double(), _values(), loss=functional.cross_entropy)
