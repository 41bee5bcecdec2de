"""Kinds of batches in capture: their layers and parameters, and which batch is of which kind."""

from typing import Any

import pytest
import torch
from kind_models import LAYERS, batch_of, captions, loss_of
from torch import nn
from torch.nn import functional

from penstock.capture.batch.lengths import Dynamic
from penstock.capture.capture import capture_model
from penstock.capture.kinds import kind_of_batch
from penstock.capture.layer_graph import LayerGraph
from penstock.errors import BadInput


def captured(first: int) -> LayerGraph:
    other = batch_of(1 - first)
    return capture_model(captions(), batch_of(first), loss=loss_of, other_examples=[other])


def layers_with_calls(graph: LayerGraph) -> list[set[str]]:
    """The units of each layer of a graph."""
    cut = graph.cut
    found: list[set[str]] = [set() for _ in cut.names]
    for number, event in enumerate(cut.record.events):
        if event.is_unit:
            found[cut.layer_of[number]].add(event.address[0])
    return found


def test_a_cut_is_between_the_same_modules_in_batches_of_both_kinds() -> None:
    graph = captured(0)
    first, other = map(layers_with_calls, graph.kinds)
    assert graph.layer_names == LAYERS
    assert [kind.layer_names for kind in graph.kinds] == [LAYERS, LAYERS]
    for with_picture, without in zip(first, other, strict=True):
        assert without == {path for path in with_picture if not path.startswith("look")}
    assert other[1:3] == [set(), set()]


def test_what_only_a_further_kind_calls_is_in_the_layer_before_and_its_parameters_are_held() -> (
    None
):
    graph = captured(1)
    assert graph.layer_names == tuple(name for name in LAYERS if not name.startswith("look"))
    first, other = map(layers_with_calls, graph.kinds)
    assert other[0] == {*first[0], "look.0", "look.1"}
    assert first[1:] == other[1:]
    for kind in graph.kinds:
        uses = {use.name: use.layers for use in kind.parameter_uses}
        assert uses["look.0.weight"] == (0,)
        held = {name for name, _ in kind.stage(range(2)).module.named_parameters()}
        assert {"look.0.weight", "look.1.bias", "words.weight"} <= held
        later = kind.stage(range(2, 6)).module
        assert "look.0.weight" not in dict(later.named_parameters())
        assert "look.0.own" in dict(kind.stage(range(2)).module.named_buffers())
        assert "look.0.own" not in dict(later.named_buffers())


class Turned(nn.Module):
    """Two layers, whose order depends on the kind of batch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, turned: torch.Tensor | None = None) -> torch.Tensor:
        first, then = (self.one, self.two) if turned is None else (self.two, self.one)
        return self.last(then(first(x).relu()).relu())


def test_layers_that_another_kind_calls_in_another_order_are_one() -> None:
    x = torch.ones(4, 4)
    graph = capture_model(
        Turned(),
        {"x": x, "y": x},
        loss=lambda output, batch: functional.mse_loss(output, batch["y"]),
        other_examples=[{"x": x, "y": x, "turned": x}],
    )
    assert graph.layer_names == ("one", "last", "loss")
    assert [layers_with_calls(kind)[0] for kind in graph.kinds] == [{"one", "two"}] * 2


@pytest.mark.parametrize("first", [0, 1])
def test_a_batch_for_outputs_is_of_the_kind_that_reads_most_of_it(first: int) -> None:
    graph = captured(first)
    for kind in (0, 1):
        number = 0 if kind == first else 1
        batch: dict[str, Any] = batch_of(kind, 3)
        assert kind_of_batch(graph, batch) == number
        del batch["labels"]
        assert kind_of_batch(graph.without_loss(), batch, for_outputs=True) == number
        with pytest.raises(BadInput, match="the batch has the keys"):
            kind_of_batch(graph, batch)


def test_a_constant_may_tell_kinds_apart() -> None:
    class Task(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x: torch.Tensor, task: int) -> torch.Tensor:
            return self.parts[task](x).sum()

    examples = [{"x": torch.ones(4, 4), "task": task} for task in (0, 1)]
    graph = capture_model(Task(), examples[0], other_examples=examples[1:])
    assert [kind_of_batch(graph, example) for example in examples] == [0, 1]
    with pytest.raises(BadInput, match=r"batch\['task'\] is 2, but was 0 at capture"):
        kind_of_batch(graph, {**examples[0], "task": 2})


def test_none_in_place_of_a_tensor_is_a_kind() -> None:
    model, labels = captions(), batch_of(1)["labels"]
    examples = [batch_of(0), {**batch_of(1), "picture": None}]
    graph = capture_model(model, examples[0], loss=loss_of, other_examples=examples[1:])
    assert [kind_of_batch(graph, example) for example in examples] == [0, 1]
    with pytest.raises(BadInput, match="the batch has the keys"):
        kind_of_batch(graph, {"labels": labels, "words": labels})


def test_a_dimension_of_a_key_that_one_kind_lacks_may_vary() -> None:
    class Sounds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.hear = nn.Linear(4, 4), nn.Linear(2, 4)

        def forward(self, x: torch.Tensor, sound: torch.Tensor | None = None) -> torch.Tensor:
            y = self.into(x)
            return (y if sound is None else y + self.hear(sound).mean(1)).square().mean()

    plain, heard = {"x": torch.ones(4, 4)}, {"x": torch.ones(4, 4), "sound": torch.ones(4, 6, 2)}
    dynamic: Dynamic = {"sound": {1: "places"}}
    graph = capture_model(Sounds(), heard, dynamic=dynamic, other_examples=[plain])
    assert [len(kind.layout.lengths) for kind in graph.kinds] == [1, 0]
    assert kind_of_batch(graph, {**plain, "sound": torch.ones(4, 9, 2)}) == 0
    with pytest.raises(BadInput, match="dynamic names 'noise', but the batch has no tensor there"):
        capture_model(Sounds(), heard, dynamic={"noise": {1: "n"}}, other_examples=[plain])
