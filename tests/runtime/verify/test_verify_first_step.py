"""The first step compares itself with the user's module, and changes nothing else."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.verify.verify_cases import batch, hooking, net, one_rank, with_flipped_sign
from torch import nn
from torch.nn import functional
from torch.optim import SGD

from penstock.capture.batch.lengths import Length
from penstock.capture.capture import capture_model
from penstock.errors import BadInput, RunFailed
from penstock.machine import FreeMemory
from penstock.plan.plan import Plan, Stage
from penstock.runtime.engine import Engine
from penstock.runtime.options import Safety
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.verify import own_module, verify


def descend(parameters: list[nn.Parameter]) -> SGD:
    return SGD(parameters, lr=0.1)


def opened(model: nn.Module, micro_batches: int = 2, **options: Any) -> Pipeline:
    """A pipeline of a model on one rank."""
    graph = capture_model(model, batch(), loss=functional.cross_entropy)
    return Pipeline(graph, batch(), plan=one_rank(graph, micro_batches), **options)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each iteration that a pipeline runs."""
    found: list[int] = []
    original = Engine.run

    def run(self: Engine, *batches: Any, **options: Any) -> Any:
        found.append(len(batches))
        return original(self, *batches, **options)

    monkeypatch.setattr(Engine, "run", run)
    return found


def trained(model: nn.Module, verify: str, steps: int = 2, batches: int = 1) -> Any:
    """Losses and weights after some steps, and the verification."""
    with opened(model, optimizer=descend, clip_norm=0.1, verify=verify) as pipe:
        losses = [pipe.step(*[batch()] * batches).loss for _ in range(steps)]
        return losses, [p.detach().clone() for p in model.parameters()], pipe.verified


@pytest.mark.parametrize(
    ("between", "batches", "more"),
    [
        (nn.Tanh, 1, 0),
        (nn.Tanh, 2, 0),
        (lambda: nn.BatchNorm1d(8), 2, 0),
        (lambda: nn.Sequential(nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Dropout(0.2)), 1, 1),
        (nn.Dropout, 2, 1),
    ],
    ids=["plain", "two batches", "batch norm, two batches", "dropout", "dropout, two batches"],
)
def test_the_first_step_is_compared_itself_unless_there_is_dropout(
    between: Callable[[], nn.Module], batches: int, more: int, runs: list[int]
) -> None:
    losses, weights, verified = trained(net(between()), "first-step", batches=batches)
    assert verified is not None and verified.equal, str(verified)
    assert verified.compared >= 4
    assert runs == [batches] * (2 + more)
    plain_losses, plain_weights, none = trained(net(between()), "off", batches=batches)
    assert none is None
    assert losses == plain_losses
    assert all(torch.equal(a, b) for a, b in zip(weights, plain_weights, strict=True))


def test_by_default_the_first_step_is_compared_and_a_line_says_how(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with opened(net(), optimizer=descend) as pipe:
        for _ in range(2):
            pipe.step(batch())
        assert capsys.readouterr().err == f"step 1: {pipe.verified}\n"
    assert str(pipe.verified).startswith("equal to your module on the whole batch: loss ")


def test_what_mixes_samples_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    for micro_batches in (2, 2, 1):
        model, safety = net(nn.BatchNorm1d(8)), Safety(verify_every=2)
        with opened(model, micro_batches, safety=safety) as pipe:
            for _ in range(2):
                pipe.step(batch())
        told = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
        expected = (
            "warning: your module is computed for each of 2 micro-batches of at most 4 samples by "
            "itself, as in gradient accumulation, and not for the 8 samples of a step at once, "
            "because it mixes samples (BatchNorm1d 'between')"
        )
        assert told == [expected] * (micro_batches == 2)


class Counting(nn.Module):
    """Counts its calls, or the samples that it has seen; with ``warms_up`` the count decides."""

    def __init__(self, of_samples: bool, warms_up: bool) -> None:
        super().__init__()
        self.count, self.of_samples, self.warms_up = 0, of_samples, warms_up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += len(x) if self.of_samples else 1
        return x * min(1.0, self.count / 10) if self.warms_up else x


@pytest.mark.parametrize("of_samples", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_count_of_calls_is_told_where_it_counts_micro_batches(
    of_samples: bool, micro_batches: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(net(Counting(of_samples, warms_up=False)), micro_batches) as pipe:
        for _ in range(2):
            pipe.step(batch())
    told = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    expected = (
        "warning: forward changes 'between.count' with each of the 2 micro-batches of a step, and "
        "your module alone changes it once; count steps outside of forward if that matters"
    )
    assert told == [expected] * (micro_batches == 2 and not of_samples)


def test_a_count_of_calls_that_decides_is_refused() -> None:
    model = net(Counting(of_samples=False, warms_up=True))
    with opened(model) as pipe, pytest.raises(RunFailed):
        pipe.step(batch())


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
@pytest.mark.parametrize("streams", [False, True])
def test_later_steps_are_compared_every_so_often(schedule: str, streams: bool) -> None:
    model, error = net(), {"by": 0.0}
    graph = capture_model(model, batch(), loss=functional.cross_entropy)
    hooking(graph, lambda module, given, made: made * (1 + error["by"]), "between")
    stages = (Stage(range(len(graph.layer_names)), (0,), (4,)),)
    options: dict[str, Any] = {
        "optimizer": descend,
        "verify": "off",
        "safety": Safety(verify_every=3),
    }
    with Pipeline(graph, batch(), plan=Plan(stages, 2, 4, schedule), **options) as pipe:
        seen = list[Any]()

        def batches(count: int) -> Any:
            for _ in range(count):
                seen.append(pipe.verified)
                yield batch()

        def train(count: int) -> None:
            if streams:
                assert len(list(pipe.stream(batches(count)))) == count
            else:
                for one in batches(count):
                    pipe.step(one)

        train(5)
        assert seen[2] is None
        assert pipe.verified is not None and pipe.verified.equal, str(pipe.verified)
        weights = [p.detach().clone() for p in pipe.parameters()]
        error["by"] = 0.5
        with pytest.raises(RunFailed, match="step 6 is not that of your module, and it was not"):
            train(1)
        assert all(map(torch.equal, pipe.parameters(), weights))


def test_a_wrong_first_step_ends_before_anything_is_trained() -> None:
    model = net()
    graph = capture_model(model, batch(), loss=functional.cross_entropy)
    with_flipped_sign(graph)
    before = [p.detach().clone() for p in model.parameters()]
    with Pipeline(
        graph, batch(), plan=one_rank(graph), optimizer=descend, verify="first-step"
    ) as pipe:
        with pytest.raises(RunFailed) as failure:
            pipe.step(batch())
        assert pipe.steps == 0
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    text = str(failure.value)
    assert text.startswith(
        "the first step is not that of your module, and nothing was trained: gradient of "
        "'first.weight' on stage 0 is "
    )
    assert ", of your module on the whole batch " in text
    assert text.endswith('train all the same with verify = "off" (--no-verify)')
    assert "\n" not in text


def test_what_cannot_be_compared_is_trained_and_says_so() -> None:
    class Noise(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """``x`` and noise."""
            return x + torch.rand_like(x)

    losses, _, verified = trained(net(Noise()), "first-step")
    assert len(losses) == 2
    assert str(verified).startswith("not compared: random operators, which are not dropout: ")


def test_a_module_without_room_on_rank_0_is_not_run_and_the_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, runs: list[int]
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("the user's module was run")

    monkeypatch.setattr(verify, "run_own_module", never)
    monkeypatch.setattr(verify, "free_memory", lambda _: FreeMemory(800.0, "RLIMIT_DATA"))
    losses, _, verified = trained(net(), "first-step")
    assert len(losses) == len(runs) == 2
    # Gradients of 4 x 8 + 8 + 8 x 3 + 3 numbers; of a micro-batch four rows of 8 and of 3 are kept.
    assert str(verified) == (
        "not compared: your module left whole needs at least 888 B more on rank 0 (weights of "
        "other ranks 0 B, gradients 536 B, activations 352 B), where 800 B can be had "
        "(RLIMIT_DATA); compare a smaller model of its kind, or give rank 0 more memory"
    )


@pytest.mark.parametrize("shortage", ["foreseen", "met"])
def test_where_the_batch_is_too_large_the_module_runs_on_a_micro_batch_at_a_time(
    shortage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, sizes = own_module.run_own_module, list[list[int]]()
    made, most = list[weakref.ref[torch.Tensor]](), [0]
    rows: list[int] = []

    def run(*given: Any, **named: Any) -> Any:
        sizes.append([len(rows) for rows in given[3]])
        if shortage == "met" and len(given[3]) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        made.clear()
        most[0] = 0
        reference = plain(*given, **named)
        rows.append(most[0])
        return reference

    class Watched(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.relu(x)
            made.append(weakref.ref(y))
            living = [each for each in (ref() for ref in made) if each is not None]
            most[0] = max(most[0], sum(map(len, living)))
            return y

    monkeypatch.setattr(verify, "run_own_module", run)
    if shortage == "foreseen":  # the run needs 1.24 kB, or 0.89 kB; the comparison 1.07 kB
        monkeypatch.setattr(verify, "free_memory", lambda _: FreeMemory(1100.0, "RLIMIT_DATA"))
    _, _, verified = trained(net(Watched()), "first-step")
    assert verified is not None and verified.equal
    assert verified.reference == (
        "your module, micro-batch by micro-batch, because the memory of rank 0 is too small for "
        "the whole batch"
    )
    assert sizes == [[4, 4]] if shortage == "foreseen" else [[8], [4, 4]]
    assert rows == [4]  # the graph of no other micro-batch is kept


def test_room_counts_for_what_comes_after_the_module_too(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 100), nn.Linear(100, 100), nn.Linear(100, 3))
    inputs = batch()[0].float(), batch()[1]
    graph = capture_model(model, inputs, loss=functional.cross_entropy)
    # The module takes 50.1 kB, of which 6.5 kB are activations; the comparison takes 87.2 kB.
    monkeypatch.setattr(verify, "free_memory", lambda _: FreeMemory(60e3, "RLIMIT_DATA"))
    with Pipeline(
        graph, inputs, plan=one_rank(graph), optimizer=descend, verify="first-step"
    ) as pipe:
        pipe.step(inputs)
        assert "(gradients 43.6 kB, gradients of the pipeline 43.6 kB)" in str(pipe.verified)


class Words(nn.Module):
    """Embeds words and guesses each from itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.embed(words)).transpose(1, 2), words)


def test_batches_of_different_lengths_in_one_step_are_trained_without_being_compared() -> None:
    torch.manual_seed(0)
    long, short = ((torch.randint(9, (4, length)),) for length in (5, 3))
    dynamic: Any = {0: {1: Length("length", max=5)}}
    graph = capture_model(Words(), long, dynamic=dynamic)
    plan = Plan((Stage(range(len(graph.layer_names)), (0,), (2,)),), 2, 2, "1f1b")
    with Pipeline(graph, long, plan=plan, optimizer=descend, verify="first-step") as pipe:
        pipe.step(long, short)
        assert str(pipe.verified) == (
            "not compared: tensor 0 of the step's 2 batches has samples of shapes (5,) and (3,), "
            "and your module takes one shape at a time; compare one of the batches with pipe.verify"
        )
        assert pipe.steps == 1
        assert pipe.verify(short).equal


def test_a_loaded_training_is_not_compared_again(tmp_path: Path, runs: list[int]) -> None:
    for resumed in (False, True):
        with opened(net(), optimizer=descend) as pipe:
            if resumed:
                pipe.load(tmp_path)
            pipe.step(batch())
            assert (pipe.verified is None) == resumed
            pipe.save(tmp_path)


def test_a_schedule_without_a_flush_is_compared_beforehand(runs: list[int]) -> None:
    model = net()
    graph = capture_model(model, batch(), loss=functional.cross_entropy)
    layers = len(graph.layer_names)
    plan = Plan((Stage(range(layers), (0,), (4,)),), 2, 4, "pipedream")
    with Pipeline(graph, batch(), plan=plan, optimizer=descend, verify="first-step") as pipe:
        losses = [metrics.loss for metrics in pipe.stream([batch()] * 3)]
        assert pipe.verified is not None and pipe.verified.equal, str(pipe.verified)
    assert len(losses) == 3
    assert runs == [1]


class Swaps(nn.Module):
    """Calls its two layers in the other order when told to."""

    swapped = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (nn.Linear(8, n) for n in (8, 8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pair = (self.first, self.second)
        for layer in reversed(pair) if self.swapped else pair:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("how", ["step", "stream", "verify"])
def test_calls_are_compared_with_the_example_again_every_so_often(how: str) -> None:
    """A plan of one stage runs whatever the user's forward does; only the comparison tells."""
    model = Swaps()
    example = torch.randn(8, 8), torch.arange(8) % 4
    graph = capture_model(model, example, loss=functional.cross_entropy)
    options: dict[str, Any] = {
        "optimizer": descend,
        "verify": "off",
        "safety": Safety(check_every=4),
    }
    with Pipeline(graph, example, plan=one_rank(graph), **options) as pipe:
        pipe.step(example)
        model.swapped = True
        for _ in range(2):
            pipe.step(example)
        told = "'second' is called where the example called 'first'"
        with pytest.raises((BadInput, RunFailed), match=told):
            if how == "verify":
                pipe.verify(example)
            elif how == "stream":
                next(iter(pipe.stream([example])))
            else:
                pipe.step(example)


def test_another_value_is_refused() -> None:
    with pytest.raises(BadInput, match='verify is "always"; it must be "first-step" or "off"'):
        trained(net(), "always")
    for name in ("verify_every", "check_every"):
        with pytest.raises(BadInput, match=f"{name} is -1; it must be a number of steps, or 0"):
            Safety(**{name: -1})


def test_no_tf32_is_used_in_a_step_that_is_compared() -> None:
    usual, seen = torch.backends.cudnn.conv.fp32_precision, list[str]()
    assert usual != "ieee"
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    example = torch.randn(4, 6), torch.arange(4) % 3
    graph = capture_model(model, example, loss=functional.cross_entropy)
    note: Any = lambda *_: seen.append(torch.backends.cudnn.conv.fp32_precision)  # noqa: E731
    model[0].register_forward_hook(note)
    plan = Plan((Stage(range(len(graph.layer_names)), (0,), (2,)),), 2, 2, "1f1b")
    with Pipeline(graph, example, plan=plan, optimizer=descend) as pipe:
        pipe.step(example)
        assert pipe.verified is not None and pipe.verified.equal
        # Two micro-batches, and the whole batch.
        assert seen[-3:] == ["ieee"] * 3
        pipe.step(example)
        assert seen[-2:] == [usual] * 2
        pipe.verify(example)
        assert seen[-3:] == ["ieee"] * 3
