"""Callbacks that follow evaluations: an early stop, and the checkpoint of the best one."""

from pathlib import Path

import pytest
from plan_here_cases import batch, made, whole
from torch.optim import SGD, Optimizer

from penstock import BadInput, Evaluation, Pipeline, keep_best, read_state, stop_early
from penstock.runtime.checkpoints.checkpoint import complete_in


def rising(parameters: list[object]) -> Optimizer:
    return SGD(parameters, lr=0.5, maximize=True)  # pyright: ignore


def falling(parameters: list[object]) -> Optimizer:
    return SGD(parameters, lr=0.05)  # pyright: ignore


def evaluated(pipe: Pipeline, steps: int) -> list[float]:
    """The loss after each step."""
    found: list[float] = []
    for _ in range(steps):
        pipe.step(batch())
        found.append(pipe.evaluate(batch()).loss)
    return found


def test_a_training_stops_after_evaluations_that_are_no_better() -> None:
    for optimizer, steps in ((rising, 4), (falling, 6)):
        with made(plan=whole(), optimizer=optimizer) as pipe:
            pipe.notify(stop_early(2))
            while not pipe.stopping and pipe.steps < 6:
                evaluated(pipe, 1)
            assert pipe.steps == steps
    with made(plan=whole(), optimizer=falling) as pipe:
        pipe.notify(stop_early(2, least=10.0))
        evaluated(pipe, 3)
        assert not pipe.stopping
        evaluated(pipe, 1)
        assert pipe.stopping


def test_the_best_checkpoint_is_kept_also_by_a_later_start(tmp_path: Path) -> None:
    with made(plan=whole(), optimizer=falling) as pipe:
        pipe.notify(keep_best(tmp_path))
        losses = evaluated(pipe, 3)
    assert losses == sorted(losses, reverse=True)
    (best,) = complete_in(tmp_path)
    assert (best.name, read_state(best)["extra"]) == ("step-00000003", {"best": losses[-1]})
    with made(plan=whole(), optimizer=rising) as pipe:
        pipe.notify(keep_best(tmp_path))
        assert min(evaluated(pipe, 2)) > losses[-1]
        assert pipe.load(tmp_path) == 3
        assert pipe.evaluate(batch()).loss == losses[-1]
    assert complete_in(tmp_path) == [best]


def test_a_metric_may_be_better_where_it_is_higher(tmp_path: Path) -> None:
    followed = keep_best(tmp_path, by="constant", highest=True)
    with made(plan=whole(), optimizer=falling, metrics={"constant": lambda *_: 0.5}) as pipe:
        pipe.notify(followed)
        evaluated(pipe, 2)
        (best,) = complete_in(tmp_path)
        assert (best.name, read_state(best)["extra"]) == ("step-00000001", {"best": -0.5})
        pipe.notify(stop_early(1, by="accurcy"))
        with pytest.raises(BadInput, match="no 'accurcy'; follow one of loss, constant"):
            pipe.evaluate(batch())


def test_several_batches_are_one_evaluation() -> None:
    found: list[object] = []
    with made(plan=whole(), optimizer=falling) as pipe:
        pipe.notify(lambda _, event: found.append(event))
        parts = [pipe.evaluate(batch(rows)) for rows in (4, 8)]
        both = pipe.evaluate(batch(4), batch(8))
    assert both == Evaluation.combined(parts)
    assert found[:3] == [*parts, both]


def test_no_evaluations_are_refused() -> None:
    with pytest.raises(BadInput, match="needs at least 1"):
        stop_early(0)
