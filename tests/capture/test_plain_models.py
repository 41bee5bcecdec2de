"""A user's own models: skips, writes in place, order of rows, losses, all kinds of parameters."""

import pytest
import torch
from capture.construct_cases import Block
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from penstock.capture.capture import capture_model


def _sequential():
    norm = nn.BatchNorm1d(8)
    layers = [nn.Linear(4, 8), norm, nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Linear(8, 3)]
    batch = (torch.randn(3, 4), torch.tensor([0, 1, 2]))
    return nn.Sequential(*layers), batch, functional.cross_entropy


class UNet(nn.Module):
    """Skips over several layers, one of them written to in place."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.down = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.bottom = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(8, 8, 2, 2)
        self.top = nn.ConvTranspose2d(16, 4, 2, 2)
        self.last = nn.Conv2d(8, 1, 1)

    def forward(self, image):
        first = functional.relu_(self.first(image))
        down = functional.relu(self.down(first), inplace=True)
        bottom = torch.relu(self.bottom(down))
        up = torch.cat([self.up(bottom), down], 1)
        return self.last(torch.cat([self.top(up), first], 1))


class TimeMajor(nn.Module):
    """Words before samples, a buffer that is counted up in place, writes through views."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.recurrent = nn.GRU(8, 8)
        self.mix = nn.Linear(8, 8)
        self.out = nn.Linear(8, 10)
        self.register_buffer("positions", torch.randn(6, 1, 8))
        self.register_buffer("counts", torch.zeros(3))

    def forward(self, words):
        self.counts[1:].add_(1)
        hidden = self.embed(words).transpose(0, 1) + self.positions * self.counts.sum()
        hidden, _ = self.recurrent(hidden)
        flat = torch.tanh(self.mix(hidden.reshape(-1, 8)))
        hidden = flat.view(6, -1, 8).transpose(0, 1)
        one, other = self.mix(hidden).chunk(2, -1)
        hidden = torch.cat([other, one], -1)
        shifted = torch.zeros_like(hidden)
        shifted[:, 1:] = hidden[:, :-1]
        return self.out(shifted + hidden).transpose(1, 2)


class MixedUses(nn.Module):
    """Checkpointing, a frozen layer, a parameter read again transposed, an idle one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.idle = nn.Linear(2, 2)

    def forward(self, values):
        with torch.no_grad():
            start = self.frozen(values)
        hidden = values + start
        for layer in self.layers:

            def run(x, layer=layer):
                return torch.relu(layer(x))

            hidden = hidden + checkpoint(run, self.norm(hidden), use_reentrant=False)
        return (hidden @ self.layers[0].weight.t()).mean(1)


class Repeated(nn.Module):
    """The same modules called three times, one of which counts its calls."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, values):
        for _ in range(3):
            values = self.norm(self.layers(values))
        return values


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(10, 8), nn.Linear(8, 10)

    def forward(self, x):
        return self.out(self.embed(x)).transpose(1, 2)


class WordCopies(Scores):
    """Code that writes into its input."""

    def forward(self, x):
        x[:, 0] = 3
        return super().forward(x)


class Two(nn.Module):
    """Two layers; a test says how they are called."""

    def __init__(self, run):
        super().__init__()
        self.one, self.two, self.run = nn.Linear(4, 4), nn.Linear(4, 4), run

    def forward(self, values):
        return self.run(self, values)


def _words():
    words = torch.randint(0, 10, (3, 6))
    return words, words.clone()


MODELS = {
    "sequential": _sequential,
    "unet": lambda: (
        UNet(),
        (torch.randn(3, 1, 8, 8), torch.randn(3, 1, 8, 8)),
        functional.mse_loss,
    ),
    "time_major": lambda: (TimeMajor(), _words(), functional.cross_entropy),
    "repeated": lambda: (Repeated(), (torch.randn(3, 4), torch.randn(3, 4)), functional.mse_loss),
    "mixed_uses": lambda: (MixedUses(), (torch.randn(3, 8), torch.randn(3)), functional.mse_loss),
}


@pytest.mark.parametrize("granularity", ["module", "operator"])
@pytest.mark.parametrize("name", list(MODELS))
def test_stages_together_equal_the_model(pipeline, name, granularity):
    model, batch, loss = MODELS[name]()
    model = model.double()
    batch = tuple(t.double() if t.is_floating_point() else t for t in batch)
    graph = capture_model(model, batch, loss=loss, granularity=granularity)
    layers = len(graph.layer_names)
    for cuts, rows in zip(([layers // 2], list(range(1, layers))), (2, 5), strict=True):
        pipeline.assert_composition_equals_model(graph, model, batch, cuts, loss=loss, rows=rows)


def test_a_skip_goes_from_its_producer_to_its_consumer():
    model, batch, loss = MODELS["unet"]()
    graph = capture_model(model, batch, loss=loss)
    assert graph.layer_names == ("first", "down", "bottom", "up", "top", "last", "loss")
    consumers = {producer: readers for _, producer, readers in graph.crossings}
    assert consumers[0] == (1, 4)
    assert consumers[1] == (2, 3)


def test_a_stage_may_run_twice_on_one_batch_that_the_code_writes_to(pipeline):
    model = WordCopies()
    words, targets = _words()
    graph = capture_model(model, (words, targets), loss=functional.cross_entropy)
    kept = words.clone()
    programs = pipeline.split(graph, [1])
    first = pipeline.run_programs(graph, programs, (words, targets)).loss
    assert torch.equal(words, kept)
    expected = functional.cross_entropy(model(words.clone()), targets)
    torch.testing.assert_close(first, expected)


def test_flattened_rows_are_counted_per_sample_and_known_to_be_out_of_order():
    batch = (torch.randn(3, 5, 4), torch.randn(3))
    for time_major in (False, True):

        def flat(net, words, time_major=time_major):
            words = words.transpose(0, 1) if time_major else words
            return net.two(net.one(words.reshape(-1, 4)).tanh())

        graph = capture_model(Two(flat), batch, loss=lambda out, y: out.mean() + y.mean())
        spec = graph.crossings[0][0]
        assert (spec.shape, spec.batch_dim, spec.rows_per_sample) == ((15, 4), 0, 5)
        assert spec.shape_for(2) == (10, 4)
        assert spec.reduced is time_major, "rows of one sample are apart: replicas cannot re-cut"


def test_a_mean_over_samples_that_crosses_is_marked_as_reduced():
    def centred(net, values):
        hidden = net.one(values)
        mean = hidden.mean(0)
        return net.two(hidden) - net.two(mean)

    batch = (torch.randn(3, 4), torch.randn(3, 4))
    graph = capture_model(Two(centred), batch, loss=functional.mse_loss, granularity="operator")
    reduced = [spec for spec, _, _ in graph.crossings if spec.reduced]
    assert reduced
    assert all(spec.batch_dim == -1 for spec in reduced)


def test_a_product_of_samples_with_samples_is_never_cut_apart():
    def in_batch(net, values):
        hidden = net.two(net.one(values))
        return (hidden @ hidden.T).softmax(-1) @ hidden

    batch = (torch.randn(3, 4), torch.randn(3, 4))
    graph = capture_model(Two(in_batch), batch, loss=functional.mse_loss, granularity="operator")
    assert all(spec.shape == (3, 4) for spec, _, _ in graph.crossings)


def test_a_loss_module_keeps_its_parameters_under_its_name(pipeline):
    class Tempered(nn.Module):
        def __init__(self):
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(2.0))

        def forward(self, scores, targets):
            return functional.cross_entropy(scores / self.temperature, targets)

    loss, (words, targets) = Tempered(), _words()
    graph = capture_model(Scores(), (words, targets), loss=loss)
    use = next(use for use in graph.parameter_uses if use.name == "loss.temperature")
    assert [graph.layer_names[layer] for layer in use.layers] == ["loss"]
    pipeline.run_programs(graph, pipeline.split(graph, [1]), (words, targets))
    assert loss.temperature.grad is not None


def test_parameters_that_nothing_reads_ride_with_the_first_stage():
    model, batch, loss = MODELS["mixed_uses"]()
    graph = capture_model(model, batch, loss=loss)
    held = dict(graph.stage(range(0, 1)).module.named_parameters())
    assert held["idle.weight"] is model.idle.weight
    assert all("idle" not in name for name, _ in graph.stage(range(1, 2)).module.named_parameters())


def test_a_dict_batch_reaches_the_loss_function_whole(pipeline):
    def loss(scores, batch):
        return functional.cross_entropy(scores, batch["y"])

    model, (words, targets) = Scores().double(), _words()
    batch = {"x": words, "y": targets}
    graph = capture_model(model, batch, loss=loss)
    pipeline.assert_composition_equals_model(graph, model, batch, [1], loss=loss, rows=4)


def test_a_detached_tensor_crosses_without_a_gradient():
    class Distilled(Two):
        def __init__(self):
            super().__init__(None)
            self.target = nn.Linear(4, 4)

        def forward(self, values):
            hidden = self.one(values)
            target = torch.tanh(self.target(hidden)).detach()
            return self.two(hidden) * target

    batch = torch.randn(3, 4), torch.tensor([0, 1, 2])
    graph = capture_model(Distilled(), batch, loss=functional.cross_entropy)
    assert graph.layer_names[:3] == ("one", "target", "two")
    assert [spec.requires_grad for spec in graph.stage(range(2)).sent] == [True, False]


def test_blocks_of_which_only_the_result_is_read_run_or_are_left_out_as_a_whole(monkeypatch):
    model = nn.Sequential(Block(4), Block(4), Block(4), nn.Linear(4, 3))
    batch = torch.randn(3, 4), torch.tensor([0, 1, 2])
    graph = capture_model(model, batch, loss=functional.cross_entropy)
    entered, forward = [], Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, x: entered.append(self) or forward(self, x))
    cut = graph.layer_names.index("2.up")
    front, back = graph.stage(range(cut)).module, graph.stage(range(cut, len(graph.layer_names)))
    assert set(front.stage.own_blocks) == {"0", "1"}
    sent = front(batch[0])
    for _ in range(2):  # the first run looks into all, to compare them with the record
        entered.clear()
        back.module(batch[1], *sent)
    assert entered == [model[2]]
