"""Python code that goes by values, samples and sizes: right for every batch, as in the module."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_training import assert_pipeline_equals_plain
from torch import nn
from torch.nn import functional
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from penstock.capture.capture import capture_model
from penstock.capture.record.absent import Absent
from penstock.errors import BadInput, CaptureFailed

WIDTH, PATCHES = 6, 8
GRIDS = [(2, 4), (4, 2), (1, 8), (8, 1), (2, 4), (4, 2), (8, 1)]


def values(rows: int) -> tuple[torch.Tensor, ...]:
    found = torch.rand(rows, 4, dtype=torch.float64) + 0.5
    return found, torch.arange(rows) % 3


def words(rows: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(rows, 5, 4, dtype=torch.float64), torch.arange(rows) % 3


def pictures(rows: int) -> tuple[torch.Tensor, ...]:
    patches = torch.randn(rows * PATCHES, 4, dtype=torch.float64)
    return patches, torch.tensor(GRIDS[:rows]), torch.arange(rows) % 3


def two(rows: int) -> tuple[torch.Tensor, ...]:
    return values(rows)[0], values(rows)[0], torch.arange(rows) % 3


class Layers(nn.Module):
    """Three layers; a test says what is done before the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, 3)

    def hidden(self, x: Any) -> Any:
        return torch.tanh(self.second(torch.tanh(self.first(x))))

    def forward(self, x: Any) -> Any:
        return self.third(self.hidden(x))


# Values.


class BranchesOnInputs(Layers):
    def forward(self, x: Any) -> Any:
        if x.min() < -9:
            raise ValueError("values that are too small")
        if x.gt(0).sum().item() == x.shape[0] * 4:
            return super().forward(x)
        return super().forward(x.abs() + 1)


class BranchesOnHidden(Layers):
    def forward(self, x: Any) -> Any:
        hidden = self.hidden(x)
        assert hidden.abs().max() < 1
        with torch.no_grad():
            factor = 2.0 if torch.isfinite(hidden).all() else 1.0
        return self.third(hidden * factor)


class AsksForLists(Layers):
    def forward(self, x: Any) -> Any:
        low, high = torch.stack([x.amin().floor(), x.amax().ceil()]).tolist()
        return super().forward(x - low) if low < high and 100.0 not in x else self.third(x)


class ScalesByTheSum(Layers):
    """A number of the batch on the way to the loss is that of the whole batch."""

    def forward(self, x: Any) -> Any:
        return super().forward(x) * max(x.sum().item(), 1.0)


class Experts(nn.Module):
    """Runs the experts that were chosen, each on the words that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.up = nn.Parameter(torch.randn(3, 4, 4))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        flat = x.reshape(-1, 4)
        self.seen = self.seen + flat.detach().abs().max()
        shares, chosen = self.router(flat).softmax(-1).max(-1)
        result = torch.zeros_like(flat)
        for expert in chosen.unique():
            (rows,) = torch.where(chosen == expert)
            result.index_add_(0, rows, torch.tanh(flat[rows] @ self.up[expert]))
        return (result * shares.unsqueeze(-1)).view(x.shape)


class Mixture(nn.Module):
    def __init__(self, kind: Any = Experts) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.layers = nn.ModuleList([kind(), kind()])

    def forward(self, x: Any) -> Any:
        hidden = self.first(x)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.last(hidden).mean(1)


class Crops(Layers):
    """A method lists the samples, and how long each is; parts run again in backward."""

    def crop(self, x: Any, size: Any) -> Any:
        return checkpoint(self.second, x, use_reentrant=False)[: size.item()]

    def forward(self, x: Any) -> Any:
        sizes = torch.full((len(x),), 3)
        hidden = torch.tanh(self.first(x))
        found = [self.crop(one, size) for one, size in zip(hidden, sizes, strict=True)]
        return self.third(torch.cat(found).view(len(x), -1, WIDTH).mean(1))


# Samples.


class CountsSamples(Layers):
    def forward(self, x: Any) -> Any:
        hidden = self.hidden(x).view(len(x), 2, 3)
        places = torch.arange(len(hidden)) * 0 + 1
        return self.third(hidden.flatten(1) * places[:, None])


class ListsSamples(Layers):
    def forward(self, x: Any) -> Any:
        listed = [sample * 2 for sample in self.hidden(x)]
        listed = [*torch.unbind(torch.stack([*listed, torch.zeros(WIDTH).double()])[:-1])]
        return self.third(torch.cat(listed).view(len(listed), WIDTH))


class CallsForEachSample(Layers):
    """Calls a module as often as there are samples."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Linear(1, 1)

    def forward(self, x: Any) -> Any:
        factors = [self.count(v.sum().view(1)) * min(float(v.sum()), 2.0) for v in x]
        return self.third(self.hidden(x) * torch.cat(factors)[:, None])


class SampleAttention(nn.Module):
    """Attention among the patches of each picture, one picture after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Any, bounds: Any) -> Any:
        parts = torch.split(self.first(hidden), (bounds[1:] - bounds[:-1]).tolist())
        return torch.cat([(part @ part.T).softmax(-1) @ part for part in parts])


class Pictures(nn.Module):
    """Each sample's picture has a grid of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.place = nn.Linear(4, WIDTH), nn.Embedding(PATCHES * 2, WIDTH)
        self.blocks = nn.ModuleList([SampleAttention(), SampleAttention()])
        self.head = nn.Linear(WIDTH, 3)

    def places(self, grid: Any) -> Any:
        found: list[Any] = []
        for high, wide in grid.tolist():
            rows = torch.arange(high).repeat_interleave(wide)
            found.append(rows * 2 + torch.arange(wide).repeat(high) % 2)
        return torch.cat(found)

    def forward(self, patches: Any, grid: Any) -> Any:
        hidden = self.patch(patches) + self.place(self.places(grid))
        bounds = functional.pad(grid.prod(1).cumsum(0), (1, 0))
        for block in self.blocks:
            hidden = hidden + block(hidden, bounds)
        pieces = torch.split(hidden, grid.prod(1).tolist())
        return self.head(torch.stack([piece.mean(0) for piece in pieces]))


# Sizes.


class Sizes(Layers):
    """What code computes from the number of samples, and look-ups in a mapped function."""

    def forward(self, x: Any, other: Any) -> Any:
        hidden = self.hidden(x)
        columns, few = hidden.numel() // other.shape[0], torch.sym_min(hidden.shape[0], 2)
        ends = x.abs().sum(1).cumsum(0)
        starts = torch.repeat_interleave(pad(ends[:-1], (1, 0)), 1 + 0 * ends.long())
        kinds = (x > 0).long()
        look_up = torch.vmap(
            lambda row, column: kinds[row].gather(0, column[None]).sum(), (None, 0)
        )
        found = torch.vmap(look_up, (0, None))(torch.arange(len(x)), torch.arange(4))
        hidden = hidden * hidden.new_ones(columns) / few * (1 + 0 * starts[:, None])
        return self.third(hidden * found.double().mean(1, keepdim=True))


CASES: dict[str, tuple[Any, Any]] = {
    "branches on inputs": (BranchesOnInputs, values),
    "branches on activations": (BranchesOnHidden, values),
    "asks for lists and numbers": (AsksForLists, values),
    "experts in plain Python, with a buffer": (Mixture, words),
    "crops samples by values": (Crops, words),
    "counts samples": (CountsSamples, values),
    "lists samples": (ListsSamples, values),
    "calls a module for each sample": (CallsForEachSample, values),
    "lists samples that have several rows": (Pictures, pictures),
}


@pytest.mark.parametrize("granularity", ["module", "block"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_module_for_every_number_of_samples(
    pipeline: Any, name: str, granularity: Any
) -> None:
    kind, batch = CASES[name]
    model, loss = kind().double(), functional.cross_entropy
    mixes = name == "asks for lists and numbers"
    graph = assert_pipeline_equals_plain(
        model, batch(4), loss=loss, granularity=granularity, per_micro_batch=mixes
    )
    assert len(graph.layer_names) > 1
    for rows in (1, 7):
        cuts = range(1, len(graph.layer_names))
        pipeline.assert_composition_equals_model(graph, model, batch(rows), cuts, loss=loss)


def test_a_number_of_the_batch_on_the_way_to_the_loss_is_that_of_the_whole_batch() -> None:
    model = ScalesByTheSum().double()
    graph = assert_pipeline_equals_plain(model, values(4), loss=functional.cross_entropy)
    assert graph.mixing == ""


def test_sizes_are_computed_from_a_stages_own_samples(pipeline: Any) -> None:
    model, loss = Sizes().double(), functional.cross_entropy
    graph = capture_model(model, two(6), loss=loss)
    for rows in (1, 2, 5):
        pipeline.assert_composition_equals_model(graph, model, two(rows), [1, 2], loss=loss)


def test_a_batch_that_takes_another_branch_is_right_or_raises_the_users_error(
    pipeline: Any,
) -> None:
    model, loss = BranchesOnInputs().double(), functional.cross_entropy
    graph = capture_model(model, values(4), loss=loss)
    x, y = values(4)
    x[2, 1] = -1.0
    pipeline.assert_composition_equals_model(graph, model, (x, y), [1, 2], loss=loss)
    x[2, 1] = -10.0
    with pytest.raises(ValueError, match="too small"):
        pipeline.run_programs(graph, pipeline.split(graph, [1, 2]), (x, y))
    assert torch.is_grad_enabled()


def test_asking_for_values_costs_no_layer_and_sends_answers_alone() -> None:
    plain, checked = (
        capture_model(kind().double(), values(4), loss=functional.cross_entropy)
        for kind in (Layers, BranchesOnHidden)
    )
    assert checked.layer_names == plain.layer_names
    shapes = [[spec.shape for spec, _, _ in graph.crossings] for graph in (plain, checked)]
    assert shapes[0] == [shape for shape in shapes[1] if shape]


def test_a_shape_that_values_decide_about_stops_the_stage(pipeline: Any) -> None:
    class FewerWords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return self.layer(x[:, :2] if (x.detach() > 500).any() else x)

    model = nn.Sequential(FewerWords(), nn.Linear(4, 3), nn.Flatten(1)).double()
    batch = words(4)
    graph = capture_model(model, batch, loss=lambda out, y: out.square().mean())
    programs = pipeline.split(graph, [1])
    pipeline.run_programs(graph, programs, batch)
    with pytest.raises(
        BadInput, match=r"'0.layer' has the shape \(4, 2, 4\), and by the example \(4, 5"
    ):
        pipeline.run_programs(graph, programs, (batch[0] * 0 + 1e3, batch[1]))


def test_on_meta_values_of_the_batch_are_there_and_those_of_activations_are_not() -> None:
    with torch.device("meta"):
        ours, theirs = BranchesOnInputs(), BranchesOnHidden()
    x, y = torch.rand(4, 4), torch.arange(4) % 3
    graph = capture_model(ours, (x, y), loss=functional.cross_entropy)
    assert graph.layer_names == ("first", "second", "third", "loss")
    line = BranchesOnHidden.forward.__code__.co_firstlineno + 2
    with pytest.raises(CaptureFailed, match=rf"test_values\.py:{line} `assert hidden"):
        capture_model(theirs, (x, y), loss=functional.cross_entropy)


class OnItsDevice(nn.Module):
    """Makes positions where its hidden state is; its targets are normalised over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 1)
        self.register_buffer("table", torch.randn(WIDTH, dtype=torch.float64))

    def forward(self, x: Any, target: Any) -> Any:
        hidden = torch.tanh(self.first(x))
        positions = torch.arange(WIDTH).to(hidden.device)
        made = self.second(hidden + self.table[positions])
        wanted = (target - target.mean()) / target.std()
        return SimpleNamespace(loss=functional.mse_loss(made[:, 0], wanted))


def test_an_absent_tensor_is_on_the_device_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where values of the whole step are found before any stage has run."""
    monkeypatch.setattr(Absent, "home", torch.device("cuda"))
    batch = {"x": values(6)[0], "target": torch.randn(6, dtype=torch.float64)}
    assert_pipeline_equals_plain(OnItsDevice().double(), batch)
