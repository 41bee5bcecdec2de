"""Capture with dimensions that vary: one record for every length."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.capture.batch.lengths import Dynamic, Length
from penstock.capture.capture import capture_model
from penstock.capture.layer_graph import LayerGraph
from penstock.errors import BadInput, CaptureFailed

VOCABULARY = 31


def padded(samples: int, length: int, pad_at: int = 0) -> dict[str, torch.Tensor]:
    """Words of which each row has another number; those that are missing are no targets."""
    source = torch.Generator().manual_seed(length)
    words = torch.randint(2, VOCABULARY, (samples, length), generator=source)
    counts = torch.randint(length // 2, length + 1, (samples, 1), generator=source)
    mask = (torch.arange(length) < counts).long()
    return {
        "input_ids": words * mask + pad_at * (1 - mask),
        "attention_mask": mask,
        "labels": words.masked_fill(mask == 0, -100),
    }


def assert_equal_at(
    pipeline: Any,
    model: nn.Module,
    graph: LayerGraph,
    batch: Any,
    stages: int = 3,
    loss: Any = None,
) -> None:
    """Loss and every gradient are those of the user's own module on the batch."""
    layers = len(graph.layer_names)
    cuts = [layers * k // stages for k in range(1, stages)]
    pipeline.assert_composition_equals_model(graph, model, batch, cuts, loss=loss, runs=2)


ONE_LENGTH: Dynamic = {key: {1: "length"} for key in ("input_ids", "attention_mask", "labels")}
TWO_LENGTHS: Dynamic = {
    "input_ids": {1: "words"},
    "attention_mask": {1: "words"},
    "labels": {1: "answers"},
}


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_language_models_are_captured_once_for_lengths_from_16_to_512(
    name: str, pipeline: Any
) -> None:
    model = pipeline.models[name]()[0].double()
    graph = capture_model(model, padded(4, 24), dynamic=ONE_LENGTH)
    for samples, length in ((4, 24), (3, 16), (1, 512)):
        batch = padded(samples, length)
        assert_equal_at(pipeline, model, graph, batch)


def test_t5_has_a_length_of_its_own_for_what_goes_in_and_for_what_comes_out(
    pipeline: Any,
) -> None:
    model = pipeline.models["t5"]()[0].double()

    def batch(samples: int, words: int, answers: int) -> dict[str, torch.Tensor]:
        return padded(samples, words) | {"labels": padded(samples, answers)["labels"]}

    graph = capture_model(model, batch(4, 12, 9), dynamic=TWO_LENGTHS, granularity="block")
    assert [length.name for length in graph.layout.lengths] == ["words", "answers"]
    for shape in ((4, 12, 9), (2, 7, 16), (3, 40, 5)):
        # T5 rounds norms to float32 in the plain model and in the stages alike.
        assert_equal_at(pipeline, model, graph, batch(*shape))


class Strided(nn.Module):
    """Convolutions that halve the number of words, padded to a multiple of four before."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(3, 4, 4, stride=2)
        self.second = nn.Linear(4, 5)
        self.third = nn.Linear(5, 2)

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        missing = -signal.shape[1] % 4
        whole = functional.pad(signal, (0, 0, 0, missing))
        heard = self.first(whole.transpose(1, 2)).relu().transpose(1, 2)
        words_first = self.second(heard).transpose(0, 1).tanh()
        return self.third(words_first).mean(0)


SIGNAL: Dynamic = {0: {1: "length"}}


def signals(samples: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(length)
    values = torch.randn(samples, length, 3, generator=source, dtype=torch.float64)
    return values, torch.randint(2, (samples,), generator=source)


def test_lengths_that_are_padded_and_halved_are_formulas_of_the_length(pipeline: Any) -> None:
    torch.manual_seed(3)
    model, loss = Strided().double(), functional.cross_entropy
    graph = capture_model(model, signals(5, 13), loss=loss, dynamic=SIGNAL)
    for samples, length in ((5, 13), (2, 31), (3, 32), (1, 9)):
        batch = signals(samples, length)
        assert_equal_at(pipeline, model, graph, batch, len(graph.layer_names), loss)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        words = self.one(signal)
        if signal.shape[1] > 16:
            words = words * 2
        return self.two(words).mean(1)


class EveryWord(nn.Module):
    """Calls a module for each word: all calls are in one stage."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        words = self.one(signal)
        state, states = words[:, 0], [words[:, 0]]
        for word in range(1, words.shape[1]):
            state = torch.tanh(self.two(state)) + words[:, word]
            states.append(state * 0.5)
        return self.three(torch.stack(states, 1)).mean(1)


class Measuring(nn.Module):
    """Returns the length beside a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, signal: torch.Tensor) -> tuple[torch.Tensor, int]:
        return self.two(torch.tanh(self.one(signal))), signal.shape[1]


class Divided(nn.Module):
    """Divides a sum by the lengths that its blocks return."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList(Measuring() for _ in range(3)), nn.Linear(3, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        total = 0
        for block in self.blocks:
            words, length = block(words)
            total += length
        return self.last(words).sum(1) / total


@pytest.mark.parametrize("build", [Branching, EveryWord, Divided])
def test_branches_and_loops_over_the_length_are_right_at_every_length(
    build: Any, pipeline: Any
) -> None:
    model, loss = build().double(), functional.cross_entropy
    graph = capture_model(model, signals(4, 24), loss=loss, dynamic=SIGNAL)
    stages = len(graph.layer_names)
    assert stages > 1
    for length in (17, 16, 30, 2):
        assert_equal_at(pipeline, model, graph, signals(3, length), stages, loss)


class Related(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, signal: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(signal)[:, 1:] * shift).mean(1)


def test_lengths_that_the_code_relates_vary_together(pipeline: Any) -> None:
    def batch(length: int, other: int) -> tuple[torch.Tensor, ...]:
        return signals(4, length)[0], signals(4, other)[0], signals(4, other)[1]

    model, loss = Related().double(), functional.cross_entropy
    dynamic: Dynamic = {0: {1: "words"}, 1: {1: "shifts"}}
    graph = capture_model(model, batch(9, 8), loss=loss, dynamic=dynamic)
    assert_equal_at(pipeline, model, graph, batch(15, 14), 2, loss)
    with pytest.raises(RuntimeError, match="must match"):  # as in the module itself
        pipeline.run_programs(graph, pipeline.split(graph, [1]), batch(15, 13))


class Fixes(Branching):
    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(signal.view(-1, 6, 3))).mean(1)


def test_code_that_fixes_the_length_is_refused_by_name() -> None:
    line = Fixes.forward.__code__.co_firstlineno + 1
    words = rf"where 'length' is 5 instead of 6: RuntimeError at .*test_lengths\.py:{line} `"
    with pytest.raises(CaptureFailed, match=words):
        capture_model(
            Fixes().double(), signals(4, 6), loss=functional.cross_entropy, dynamic=SIGNAL
        )


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        (
            {2: {1: "length"}},
            r"dynamic names 2, but the batch has no tensor there; its tensors are",
        ),
        ({0: {0: "length"}}, r"dimension 0 of batch\[0\], which is the samples"),
        ({0: {3: "length"}}, r"dimension 3 of batch\[0\], which has shape \(4, 6, 3\)"),
        ({0: {1: Length("length", max=5)}}, r"is 6, but 'length' is declared to be at most 5"),
        ({0: {1: "same", 2: "same"}}, r"'same' is declared to be one length, but"),
        ({0: {1: Length("a", max=9), 2: Length("a", max=8)}}, r"declared with two ranges"),
    ],
)
def test_declarations_that_do_not_fit_the_example_are_refused(
    dynamic: Mapping[Any, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        capture_model(
            Branching().double(), signals(4, 6), loss=functional.cross_entropy, dynamic=dynamic
        )
