"""What the model returns comes out of the stages as out of the model, however it is cut."""

import copy
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.capture.chain import Chain
from penstock.capture.layer_graph import LayerGraph
from penstock.errors import BadInput

Case = tuple[nn.Module, Any, Any]


class SeveralOutputs(nn.Module):
    """Returns work of several layers, something only returned, a leaf, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 2)
        self.last = nn.Linear(8, 3)
        self.drop = nn.Dropout(0.5)

    def forward(self, values: torch.Tensor) -> dict[str, Any]:
        first = torch.relu(self.first(values))
        second = self.drop(torch.tanh(self.second(first)))
        scores = self.last(second + first)
        extra = self.unused(first * second).softmax(-1)
        return {
            "scores": scores,
            "hidden": (first, [second]),
            "extra": extra,
            "input": values,
            "mean": scores.mean(),
            "words": "as they are",
            "nothing": None,
        }


def several() -> Case:
    batch = (torch.randn(6, 4), torch.randint(3, (6,)))
    return SeveralOutputs(), batch, lambda out, y: functional.cross_entropy(out["scores"], y)


def with_batch_norm() -> Case:
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)]
    batch = (torch.randn(6, 4), torch.randint(3, (6,)))
    return nn.Sequential(*layers), batch, functional.cross_entropy


def hand_written() -> Case:
    model, batch, loss = with_batch_norm()
    return Chain(list(model.children()), loss=loss), batch, None


class OwnLoss(nn.Module):
    """The end of a chain that gives loss and scores."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.linear(values)
        return {"loss": scores.square().mean(), "scores": scores}


def chain_with_its_own_loss() -> Case:
    return Chain([nn.Linear(4, 8), OwnLoss()]), (torch.randn(6, 4),), None


def t5() -> Case:
    tokens = torch.randint(1, 20, (4, 5))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    return models.t5(vocab_size=20), batch, None


CASES = [several, with_batch_norm, hand_written, chain_with_its_own_loss, t5]


def expected(model: nn.Module, batch: Any) -> Any:
    whole = copy.deepcopy(model).eval()
    with torch.no_grad():
        if isinstance(batch, dict):
            return whole(**batch, use_cache=False)
        return whole(batch[0])


def outputs_of(graph: LayerGraph, batch: Any, cuts: list[range]) -> Any:
    """What the stages of ``cuts`` give, in evaluation mode, with named tensors between them."""
    leaves = graph.known_leaves(batch)
    values: dict[str, torch.Tensor] = {}
    found: dict[int, torch.Tensor] = {}
    for layers in cuts:
        program = graph.stage(layers)
        graph.set_training(False)
        inputs = [leaves[index] for index in program.batch_inputs]
        with torch.no_grad():
            made = program.module(*inputs, *(values[spec.name] for spec in program.received))
        values |= {s.name: t for s, t in zip(program.sent, made, strict=False)}
        if program.outputs:
            found |= dict(zip(program.outputs, made[-len(program.outputs) :], strict=True))
        graph.set_training(True)
    specs = graph.outputs.specs
    rows = next(iter(leaves.values())).shape[0]
    for spec, (_, tensor) in zip(specs, sorted(found.items()), strict=True):
        assert tuple(tensor.shape) == spec.shape_for(rows)
        assert tensor.dtype == spec.dtype
    return graph.outputs.rebuild([tensor for _, tensor in sorted(found.items())])


def flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [x for k, v in value.items() if k != "loss" for x in (k, *flat(v))]
    if isinstance(value, list | tuple):
        return [x for v in value for x in flat(v)]
    return [value]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("view", ["without_loss", "with_outputs"])
def test_outputs_of_one_stage_and_of_every_cut_are_the_models(
    case: Callable[[], Case], view: str
) -> None:
    torch.manual_seed(0)
    model, batch, loss = case()
    graph = capture_model(model, batch, loss=loss)
    theirs = flat(expected(model, batch))
    seen = getattr(graph, view)()
    layers = len(graph.layer_names)
    cuts = [[range(0, c), range(c, layers)] for c in range(1, layers)]
    cuts += [[range(layers)], [range(i, i + 1) for i in range(layers)]]
    for cut in cuts:
        result = outputs_of(seen, batch, cut)
        ours = flat(result)
        assert len(ours) == len(theirs) > 0
        for one, other in zip(ours, theirs, strict=True):
            if isinstance(other, torch.Tensor):
                assert torch.allclose(one, other, atol=1e-6), cut
            else:
                assert one == other


def test_results_keep_the_type_of_the_model_and_lack_only_the_loss() -> None:
    model, batch, _ = t5()
    graph = capture_model(model, batch).without_loss()
    result = outputs_of(graph, batch, [range(len(graph.layer_names))])
    assert type(result).__name__ == "Seq2SeqLMOutput"
    assert result.loss is None and result.logits.shape == (4, 5, 20)


def test_what_only_outputs_need_is_with_the_last_layers() -> None:
    model, batch, loss = several()
    graph = capture_model(model, batch, loss=loss)
    assert graph.layer_names == ("first", "second", "last", "unused", "loss")
    held = [dict(graph.stage(range(i, i + 1)).module.named_parameters()) for i in range(5)]
    assert ["unused.weight" in names for names in held] == [False, False, False, True, False]


def test_a_batch_for_predictions_may_lack_its_target() -> None:
    model, (values, target), loss = with_batch_norm()
    graph = capture_model(model, (values, target), loss=loss).without_loss()
    for batch in (values, (values,), [values], (values, target)):
        assert torch.equal(graph.known_leaves(batch)[0], values)
    with pytest.raises(BadInput, match="dimension 1 is 3, but was 4"):
        graph.known_leaves(values[:, :3])


def test_a_dict_may_lack_the_keys_that_no_output_is_computed_from() -> None:
    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            scores = self.linear(x)
            return {"loss": functional.cross_entropy(scores, y), "scores": scores}

    batch = {"y": torch.randint(3, (6,)), "x": torch.randn(6, 4)}
    model = Scored()
    graph = capture_model(model, batch).without_loss()
    result = outputs_of(graph, {"x": batch["x"]}, [range(len(graph.layer_names))])
    assert result["loss"] is None
    assert torch.equal(result["scores"], model.linear(batch["x"]))
    with pytest.raises(BadInput, match="the batch has no 'x'"):
        graph.known_leaves({"y": batch["y"]})


def test_results_that_hold_no_tensors_do_not_keep_a_model_from_training() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, object]:
            return self.linear(x).mean(), object()

    graph = capture_model(Odd(), (torch.randn(3, 4),))
    assert graph.stage(range(len(graph.layer_names))).is_last
    with pytest.raises(BadInput, match=r"result\[1\] is a object, but predictions"):
        graph.without_loss()
