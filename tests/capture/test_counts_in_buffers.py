"""Buffers that forward writes from the samples: each replica of a stage would have its own."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.errors import BadInput
from penstock.plan.plan import Plan, Stage
from penstock.runtime.options import Safety
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.stage.building import check_counts, check_plan_fits

SIZE = 6
THREE_RANKS = SimpleNamespace(size=3)


class Net(nn.Module):
    """Three layers; ``between`` is given the model, the batch and the first layer's result."""

    def __init__(self, between=None, middle=None):
        super().__init__()
        self.first, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 3)
        self.middle = middle or nn.Linear(SIZE, SIZE)
        self.up = nn.Parameter(torch.randn(SIZE))
        self.between = between
        self.register_buffer("kept", torch.zeros(SIZE))
        self.register_buffer("number", torch.zeros(()))

    def forward(self, x):
        hidden = self.first(x) * self.up
        if self.between:
            with torch.no_grad():
                self.between(self, x, hidden)
        return self.last(torch.tanh(self.middle(hidden)))


def chosen(hidden):
    return functional.one_hot(hidden.argmax(-1), SIZE).to(hidden.dtype).sum(0)


def adds_up(net, x, hidden):
    net.kept.add_(chosen(hidden))


def rebinds(net, x, hidden):
    net.kept = net.kept + chosen(hidden)


def through_a_view(net, x, hidden):
    net.kept[2:] += hidden.abs().sum(0)[2:]


def counts_of_the_batch(net, x, hidden):
    net.number += (x > 0).sum()


def counts_samples(net, x, hidden):
    net.number += x.shape[0]


def counts_calls(net, x, hidden):
    net.number += 1


def follows_weights(net, x, hidden):
    net.kept.lerp_(net.up, 0.1)


def keeps_a_table(net, x, hidden):
    net.kept = torch.arange(x.shape[1]) * 1.0


class Counting(nn.Module):
    """A layer that counts within; ``rebinds`` says how."""

    def __init__(self, rebinds):
        super().__init__()
        self.layer, self.rebinds = nn.Linear(SIZE, SIZE), rebinds
        self.register_buffer("count", torch.zeros(SIZE))

    def forward(self, x):
        scores = self.layer(x)
        with torch.no_grad():
            if self.rebinds:
                self.count = self.count + chosen(scores)
            else:
                self.count += chosen(scores)
        return scores


class OwnNorm(nn.Module):
    """A batch norm with buffers of other names."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)
        self.register_buffer("mu", torch.zeros(SIZE))
        self.register_buffer("square", torch.ones(SIZE))

    def forward(self, x):
        return functional.batch_norm(self.layer(x), self.mu, self.square, training=True)


class Asking:
    """It asks for values, so that it runs on such when it is recorded."""

    def forward(self, x):
        return super().forward(x) * float(x.abs().sum() > -1)


class AskingCount(Asking, Counting):
    """It counts."""


class AskingNorm(Asking, OwnNorm):
    """It normalises."""


def batch_of(samples=6):
    torch.manual_seed(samples)
    return torch.randn(samples, SIZE), torch.arange(samples) % 3


def counts_of(model, **options):
    graph = capture_model(model, batch_of(), loss=functional.cross_entropy, **options)
    return graph, graph.recorded.counts


@pytest.mark.parametrize(
    ("between", "name"),
    [
        (adds_up, "kept"),
        (rebinds, "kept"),
        (through_a_view, "kept"),
        (counts_of_the_batch, "number"),
        (counts_samples, "number"),
    ],
)
def test_what_is_written_between_layers_is_named_with_its_line(between, name):
    _, counts = counts_of(Net(between))
    assert list(counts) == [name]
    line = between.__code__.co_firstlineno + 1
    assert f"test_counts_in_buffers.py:{line} `net." in counts[name]


@pytest.mark.parametrize("granularity", ["module", "block", "operator"])
@pytest.mark.parametrize("kind", [Counting, AskingCount])
@pytest.mark.parametrize("rebinding", [False, True])
def test_what_a_layer_counts_is_named(kind, rebinding, granularity):
    middle = nn.Sequential(kind(rebinding), nn.Linear(SIZE, SIZE))
    _, counts = counts_of(Net(middle=middle), granularity=granularity)
    assert list(counts) == ["middle.0.count"]


@pytest.mark.parametrize(
    "model",
    [
        Net(),
        Net(counts_calls),
        Net(follows_weights),
        Net(keeps_a_table),
        Net(middle=nn.BatchNorm1d(SIZE)),
        Net(middle=nn.BatchNorm1d(SIZE, affine=False)),
        Net(middle=nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE))),
        Net(middle=OwnNorm()),
        Net(middle=AskingNorm()),
        Net(middle=nn.utils.parametrizations.spectral_norm(nn.Linear(SIZE, SIZE))),
        Net(middle=nn.utils.spectral_norm(nn.Linear(SIZE, SIZE))),
    ],
    ids=lambda model: f"{getattr(model.between, '__name__', '')} {type(model.middle).__name__}",
)
@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
def test_what_is_alike_on_replicas_is_no_count(model):
    graph, counts = counts_of(model)
    assert counts == {}
    check_counts(two_stages(graph, replicas=2, micro_batches=1), graph)


def two_stages(graph, *, replicas, micro_batches=2):
    """The first layer, and the others with so many replicas."""
    layers, rows = len(graph.layer_names), 6 // micro_batches
    own = tuple(range(1, 1 + replicas))
    second = Stage(range(1, layers), own, (rows // replicas,) * replicas)
    return Plan((Stage(range(1), (0,), (rows,)), second), micro_batches, rows, "1f1b")


@pytest.mark.parametrize("affine", [False, True])
def test_the_running_statistics_of_instance_norms_are_of_the_samples(affine):
    norm = nn.InstanceNorm1d(1, affine=affine, track_running_stats=True)
    middle = nn.Sequential(nn.Unflatten(1, (1, SIZE)), norm, nn.Flatten())
    assert list(counts_of(Net(middle=middle))[1]) == ["middle.1.running_mean"]


@pytest.mark.parametrize("middle", [Counting(False), Counting(True)])
def test_replicas_of_a_stage_that_counts_are_refused_and_of_others_are_not(middle):
    graph, _ = counts_of(Net(middle=middle))
    with pytest.raises(BadInput, match=r"'middle.count'.*2 workers of stage 1 .* one worker$"):
        check_plan_fits(
            two_stages(graph, replicas=2, micro_batches=1), graph, THREE_RANKS, may_idle=True
        )
    check_plan_fits(two_stages(graph, replicas=1), graph, THREE_RANKS, may_idle=True)
    layers = len(graph.layer_names)
    first = Stage(range(1), (0, 1), (1, 2))
    check_counts(Plan((first, Stage(range(1, layers), (2,), (3,))), 2, 3, "1f1b"), graph)


@pytest.mark.parametrize("between", [adds_up, rebinds, through_a_view, counts_samples])
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_with_one_worker_micro_batches_add_up_to_the_whole_batch(between, micro_batches):
    model = Net(between).double()
    whole = copy.deepcopy(model)
    batch = batch_of()
    batch = batch[0].double(), batch[1]
    graph = capture_model(model, batch, loss=functional.cross_entropy)
    pipe = Pipeline(
        graph,
        batch,
        plan=two_stages(graph, replicas=1, micro_batches=micro_batches),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        safety=Safety(transport="in-process"),
        verify="off",
    )
    for _ in range(2):
        pipe.step(batch)
        whole(batch[0])
    for name, buffer in whole.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer, rtol=1e-12, atol=1e-12)


def test_a_buffer_that_the_first_forward_registers_is_of_every_stage():
    def registers(net, x, hidden):
        if not hasattr(net, "largest"):
            net.register_buffer("largest", torch.zeros(()))
        net.largest = net.largest + x.sum()

    graph, counts = counts_of(Net(registers))
    assert list(counts) == ["largest"]
    with pytest.raises(BadInput, match=r"'largest'.* 2 workers of stage 1"):
        check_counts(two_stages(graph, replicas=2, micro_batches=1), graph)


def test_a_buffer_that_code_between_modules_reads_is_of_the_layers_that_read_it():
    """So what the user writes to it on their rank is what a checkpoint holds."""

    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))
            self.register_buffer("bias", torch.zeros(SIZE))
            self.register_buffer("places", torch.arange(SIZE))

        def forward(self, x):
            hidden = self.layers[0](x + self.places)
            return self.layers[2](self.layers[1](hidden).relu() + self.bias)

    batch = torch.randn(4, SIZE), torch.zeros(4, dtype=torch.long)
    graph = capture_model(Biased(), batch, loss=functional.cross_entropy)
    uses = {use.name: use.layers for use in graph.parameter_uses}
    (layer,) = uses["bias"]
    assert graph.layer_names[layer] in ("layers.1", "layers.2")
    assert uses["places"] == tuple(range(len(graph.layer_names)))
