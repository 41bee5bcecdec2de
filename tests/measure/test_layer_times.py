"""A measured profile says what the layers really cost."""

import gc
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.capture.forward.stage_module import StageProgram
from penstock.capture.layer_graph import LayerGraph
from penstock.capture.record import stand_ins
from penstock.errors import BadInput
from penstock.measure import layer_times
from penstock.measure.layer_runs import LayerRun, RunSettings
from penstock.measure.layer_times import (
    measure_profile,
    measure_step_s_per_byte,
    time_stages,
    whole_model,
)
from penstock.measure.roofline import estimate_profile
from penstock.profile.model_profile import Affine, ModelProfile, SharedParameter

PER_SAMPLE_S = 0.004


class Clock:
    """A clock that stands still, but for the layers whose time is known; a look at it takes long
    where ``look_s`` is set."""

    now_s = 0.0
    look_s = 0.0

    @classmethod
    def look(cls) -> float:
        cls.now_s += cls.look_s
        return cls.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> type[Clock]:
    """What the stopwatch looks at instead of the machine's clock."""
    looks = SimpleNamespace(perf_counter=Clock.look, process_time=Clock.look)
    monkeypatch.setattr("penstock.measure.clock.time", looks)
    monkeypatch.setattr("penstock.measure.clock.core_seconds", lambda: (0.0, 0.0))
    monkeypatch.setattr(Clock, "look_s", 0.0)
    return Clock


class Slow(torch.autograd.Function):
    """Forward of 4 ms a sample, backward of three times that."""

    @staticmethod
    def forward(context: object, x: torch.Tensor) -> torch.Tensor:
        Clock.now_s += PER_SAMPLE_S * len(x)
        return x.clone()

    @staticmethod
    def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:
        Clock.now_s += 3 * PER_SAMPLE_S * len(gradient)
        return gradient


class SlowLayer(nn.Module):
    """A layer whose time is known."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Slow.apply(x * self.scale)  # type: ignore[return-value]


def example(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 16, generator=generator), torch.arange(rows) % 4


def chain(**parts: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(parts))


def net() -> nn.Sequential:
    return chain(wide=nn.Linear(16, 32), norm=nn.BatchNorm1d(32), out=nn.Linear(32, 4))


def graph_of(model: nn.Module) -> LayerGraph:
    return capture_model(model, example(), loss=functional.cross_entropy, granularity="block")


def test_times_are_those_of_the_layers_and_grow_with_the_samples(clock: type[Clock]) -> None:
    model = chain(first=nn.Linear(16, 16), slow=SlowLayer(), out=nn.Linear(16, 4))
    profile = measure_profile(graph_of(model), example(), batch_sizes=(2, 8), repeats=3)
    slow = profile.layers[1]
    for samples in (2, 8):
        assert slow.forward_s.at(samples) == pytest.approx(PER_SAMPLE_S * samples)
        assert slow.backward_s.at(samples) == pytest.approx(3 * PER_SAMPLE_S * samples)
    assert slow.backward_weight_s.at(8) == 0
    assert profile.batch_size == 8
    others = [layer for layer in profile.layers if layer.name != "slow"]
    assert all(layer.forward_s.at(8) == layer.backward_s.at(8) == 0 for layer in others)


def test_a_stage_is_timed_in_the_order_of_a_pipeline(
    clock: type[Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forwards and backwards take turns, with one more forward under way, and each counts once."""
    told: list[str] = []

    def telling(letter: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def tells(*given: Any) -> Any:
            told.append(letter)
            return work(*given)

        return tells

    graph = graph_of(chain(slow=SlowLayer(), out=nn.Linear(16, 4)))
    leaves, settings = graph.batch_leaves(example()), RunSettings(torch.device("cpu"))
    stages = whole_model(graph, 1)
    time_stages(stages, leaves, settings)  # the first call of a stage does more
    monkeypatch.setattr(LayerRun, "forward", telling("F", LayerRun.forward))
    monkeypatch.setattr(torch.autograd, "backward", telling("B", torch.autograd.backward))
    found = time_stages(stages, leaves, settings)
    assert "".join(told) == "FFBFBB"
    own_s = 8 * PER_SAMPLE_S
    assert (found.forward_s, found.backward_s) == pytest.approx((own_s, 3 * own_s))


def test_the_whole_model_is_timed_in_turns_with_layers_and_with_several_stages(
    clock: type[Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several stages at the middle size only."""
    runs: list[tuple[int, int]] = []

    def noted(stages: Sequence[StageProgram], leaves: Sequence[torch.Tensor], *_: object) -> Any:
        runs.append((len(stages), len(leaves[0])))
        return layer_times.PassSeconds(len(leaves[0]), len(leaves[0]))

    monkeypatch.setattr(layer_times, "time_stages", noted)
    graph = graph_of(chain(slow=SlowLayer(), out=nn.Linear(16, 4)))
    profile = measure_profile(graph, example(), batch_sizes=(2, 4, 8), repeats=3)
    layers = len(profile.layers)
    assert Counter(runs) == {(1, 2): 4, (1, 4): 4, (1, 8): 4, (layers, 4): 4}
    assert [profile.forward_s(range(layers), n) for n in (2, 4, 8)] == pytest.approx([2, 4, 8])


def test_the_variation_is_that_of_the_whole_model_in_one_stage(
    clock: type[Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six turns of 9, 10, 11, 9, 10 and 11, after a warm-up; in several stages any time."""
    seconds = {2: cycle([99.0, *[9.0, 10.0, 11.0] * 2]), 8: cycle([5.0, *[90.0, 100.0, 110.0] * 2])}

    def timed(stages: Sequence[StageProgram], leaves: Sequence[torch.Tensor], *_: object) -> Any:
        last = next(seconds[len(leaves[0])]) if len(stages) == 1 else clock.now_s
        return layer_times.PassSeconds(last / 4, 3 * last / 4)

    monkeypatch.setattr(layer_times, "time_stages", timed)
    graph = graph_of(chain(slow=SlowLayer(), out=nn.Linear(16, 4)))
    profile = measure_profile(graph, example(), batch_sizes=(2, 8), repeats=3)
    assert profile.variation == pytest.approx((4 / 5) ** 0.5 / 10)


def test_layers_are_timed_with_the_memory_that_training_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the engine does; else the kernel clears pages for each tensor of a layer."""
    asked: list[torch.device] = []
    monkeypatch.setattr(layer_times, "keep_freed_memory", asked.append)
    measure_profile(graph_of(net()), example(), batch_sizes=(2,), repeats=1)
    assert asked == [torch.device("cpu")]


def test_batch_norms_that_use_their_own_statistics_are_counted_with_their_channels() -> None:
    """As modules and as functions; not where statistics are kept."""

    class Functions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.kept = nn.Linear(16, 6), nn.BatchNorm1d(6).eval()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = functional.batch_norm(self.first(x), None, None, training=True)
            x = functional.batch_norm(x[:, :4], None, None, None, None, True)
            return functional.batch_norm(x, torch.zeros(4), torch.ones(4))

    for graph, norms, channels in ((graph_of(net()), 1, 32), (graph_of(Functions()), 2, 10)):
        for profile in (
            measure_profile(graph, example(), batch_sizes=(4, 8), repeats=1),
            estimate_profile(graph, example(), "H100-80GB"),
        ):
            assert sum(layer.norms for layer in profile.layers) == norms
            assert sum(layer.norm_channels for layer in profile.layers) == channels


def test_what_replicas_compute_around_a_sum_of_statistics_is_measured(
    clock: type[Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are norms: two in the model, each with a sum in forward and one in backward."""

    def slow(*arguments: object) -> None:
        Clock.now_s += 0.6

    monkeypatch.setattr("penstock.runtime.stage.batch_norm.update_running", slow)
    normed = nn.Sequential(SlowLayer(), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.BatchNorm1d(16))
    statistics_s = [
        measure_profile(graph_of(model), example(), batch_sizes=(2,), repeats=1).statistics_s
        for model in (nn.Sequential(normed, nn.Linear(16, 4)), nn.Linear(16, 4))
    ]
    assert statistics_s == [pytest.approx(0.3), ModelProfile.statistics_s]


def test_layers_are_measured_alone_where_memory_does_not_hold_the_model(
    clock: type[Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their own values: a router sends rows by them."""

    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = chain(first=nn.Linear(16, 16), slow=SlowLayer(), out=nn.Linear(16, 4))
    graph, before = graph_of(model), [p.detach().clone() for p in model.parameters()]
    whole = measure_profile(graph, example(), batch_sizes=(2, 8), repeats=1)
    monkeypatch.setattr(layer_times, "whole_model", refuse)
    alone = measure_profile(graph, example(), batch_sizes=(2, 8), repeats=1)
    assert alone.layers[1].forward_s.at(8) == pytest.approx(PER_SAMPLE_S * 8)
    for ours, theirs in zip(alone.layers, whole.layers, strict=True):
        assert ours.saved_bytes == theirs.saved_bytes
        assert ours.parameter_bytes == theirs.parameter_bytes
    assert (alone.stage_forward_s, alone.edges) == (0, whole.edges)
    assert layer_times.LAYERS_ALONE in alone.notes and layer_times.LAYERS_ALONE not in whole.notes
    assert all(map(torch.equal, before, model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_saved_bytes_are_exact_and_a_tensor_saved_twice_counts_once() -> None:
    model = chain(wide=nn.Linear(16, 32), relu=nn.ReLU(), out=nn.Linear(32, 4))
    profile = measure_profile(graph_of(model), example(), batch_sizes=(2, 4, 8), repeats=1)
    wide, out, loss = (layer.saved_bytes for layer in profile.layers)
    assert wide == Affine(0, 32 * 4)  # its result; the batch is there anyway
    assert out == Affine(0, 0)  # its input, which the layer before saves, too
    assert 4 * 4 <= loss.per_sample < 32 * 4  # the log-softmax


def test_parameters_buffers_and_edges_are_counted_in_bytes() -> None:
    profile = measure_profile(graph_of(net()), example(), repeats=1)
    wide, out, loss = profile.layers
    assert (wide.name, wide.parameter_bytes) == ("wide", (16 * 32 + 32 + 2 * 32) * 4)
    assert (out.name, out.parameter_bytes) == ("out", (32 * 4 + 4) * 4)
    assert (loss.name, loss.parameter_bytes) == ("loss", 0)
    assert wide.buffer_bytes == 2 * 32 * 4 + 8
    edges = {(e.producer, e.consumer): (e.bytes, e.gradient_bytes) for e in profile.edges}
    scores = Affine(0, 4 * 4)
    assert edges == {(0, 1): (Affine(0, 32 * 4), Affine(0, 32 * 4)), (1, 2): (scores, scores)}


def test_a_tied_parameter_is_shared_and_belongs_to_no_layer() -> None:
    model = chain(a=nn.Linear(16, 16, bias=False), b=nn.Linear(16, 16, bias=False))
    model.get_submodule("b").weight = model.get_submodule("a").weight
    profile = measure_profile(graph_of(model), example(), repeats=1)
    assert profile.shared == (SharedParameter("a.weight", 16 * 16 * 4, (0, 1)),)
    assert all(layer.parameter_bytes == 0 for layer in profile.layers)


def test_frozen_parameters_need_no_gradient_and_count_as_buffers() -> None:
    model = chain(wide=nn.Linear(16, 32), out=nn.Linear(32, 4))
    model.get_submodule("wide").requires_grad_(False)
    profile = measure_profile(graph_of(model), example(), repeats=1)
    assert profile.layers[0].parameter_bytes == 0
    assert profile.layers[0].buffer_bytes == (16 * 32 + 32) * 4
    assert profile.layers[0].backward_s.at(8) == 0


@pytest.mark.parametrize("device", ["here", "H100-80GB"])
def test_costs_leave_the_model_as_it_was(device: str) -> None:
    class Counting(nn.Module):
        """Changes what it holds with every call, within a unit and between units."""

        def __init__(self) -> None:
            super().__init__()
            self.net, self.calls, self.kept = net(), 0, torch.zeros(())
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.seen += 1
            self.kept = self.net(x)
            return self.kept

    model = Counting().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random_before, attributes = torch.get_rng_state(), dict(vars(model))
    if device == "here":
        measure_profile(graph_of(model), example(), repeats=1)
    else:
        estimate_profile(graph_of(model), example(), device)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_before)
    assert vars(model) == attributes
    assert not any(part.training for part in model.modules())


class Buffer(bytearray):
    """The memory of a tensor, which tells when that is gone."""


def test_a_model_on_meta_is_measured_one_layer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alive, most = 0, 0
    make = stand_ins.made_up

    def watched(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        nonlocal alive, most
        size = tensor.numel() * tensor.element_size()
        buffer = Buffer(size)

        def gone() -> None:
            nonlocal alive
            alive -= size

        weakref.finalize(buffer, gone)
        alive += size
        most = max(most, alive)
        value = torch.frombuffer(buffer, dtype=tensor.dtype).view(tensor.shape)
        return value.copy_(make(tensor, device))

    monkeypatch.setattr(stand_ins, "made_up", watched)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    measured = measure_profile(graph_of(model), example(), repeats=1)
    real = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    expected = measure_profile(graph_of(real), example(), repeats=1)
    assert most == (16 * 16 + 16) * 4
    assert alive == 0
    assert all(p.is_meta for p in model.parameters())
    for one, other in zip(measured.layers, expected.layers, strict=True):
        assert one.saved_bytes == other.saved_bytes
        assert one.parameter_bytes == other.parameter_bytes
        assert one.forward_s.at(8) > 0


def test_layers_add_up_to_the_whole_model(clock: type[Clock], monkeypatch: Any) -> None:
    """Every stage costs 5 ms beyond its layers; without a correction a layer seems to cost them.

    Layers that cost nothing keep a tenth of what they seem to, at the cost of the others: 0.5 %.
    """
    monkeypatch.setattr(clock, "look_s", 0.005)
    model = nn.Sequential(nn.Linear(16, 16), *(SlowLayer() for _ in range(6)))
    batch = (torch.randn(64, 16), torch.zeros(64, dtype=torch.long))
    graph = capture_model(model, batch, loss=functional.cross_entropy)
    profile = measure_profile(graph, batch, batch_sizes=(16, 64), repeats=3)
    everything = range(len(profile.layers))
    for samples in (16, 64):
        forward_s = 6 * PER_SAMPLE_S * samples
        assert profile.forward_s(everything, samples) == pytest.approx(forward_s, rel=0.005)
        assert profile.backward_s(everything, samples) == pytest.approx(3 * forward_s, rel=0.005)
    assert profile.stage_forward_s == pytest.approx(0.005)
    assert profile.stage_backward_s == pytest.approx(0.005)


def test_a_step_is_timed_without_moving_the_parameters() -> None:
    model = nn.Linear(64, 64)
    before = model.weight.detach().clone()
    seconds = measure_step_s_per_byte(model, lambda ps: torch.optim.AdamW(ps, lr=1.0))
    assert seconds > 0
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None


@pytest.mark.parametrize(("sizes", "repeats"), [((0, 4), 1), ((4,), 0)])
def test_nothing_cannot_be_measured(sizes: tuple[int, ...], repeats: int) -> None:
    with pytest.raises(BadInput, match="must be >= 1"):
        measure_profile(graph_of(net()), example(), batch_sizes=sizes, repeats=repeats)


def test_layers_of_the_same_work_have_the_same_times() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(5)]
    model = nn.Sequential(nn.Linear(16, 24), *blocks, nn.Linear(24, 4))
    graph = capture_model(model, example(), loss=functional.cross_entropy, granularity="module")
    profile = measure_profile(graph, example(), repeats=1)
    linear = [layer for layer in profile.layers if layer.parameter_bytes == (24 * 24 + 24) * 4]
    times = {(x.forward_s, x.backward_input_s, x.backward_weight_s) for x in linear}
    assert len(linear) == 5
    assert len(times) == 1
    others = {x.forward_s for x in profile.layers if x.parameter_bytes} - {linear[0].forward_s}
    assert len(others) == 2


def test_nothing_that_layers_save_is_left_for_the_garbage_collector() -> None:
    """On a GPU it would take the memory of a micro-batch until Python happens to collect."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    batch = (torch.randn(4, 8), torch.randn(4, 1))
    graph = capture_model(model, batch, loss=nn.MSELoss())

    def living() -> int:
        tensors = (thing for thing in gc.get_objects() if type(thing) is torch.Tensor)
        return sum(tensor.device.type == "cpu" for tensor in tensors)

    gc.collect()
    gc.disable()
    try:
        measure_profile(graph, batch, batch_sizes=(2, 4), repeats=1)
        left = living()
        gc.collect()
        assert left == living()
    finally:
        gc.enable()
