"""Every synchronous schedule gives loss, gradients and weights of one process, in float64."""

from collections.abc import Sequence
from typing import Any

import pytest
from runtime.matrix_cases import captured, play
from runtime.matrix_plans import (
    MIRRORED,
    SYNCHRONOUS,
    Case,
    drawn,
    every_case,
    model_cases,
    of_every_kind,
    representative,
)

from penstock.runtime.processes.launch import launch_workers

# All cases of a launch are played in the first test that asks for them.
pytestmark = pytest.mark.timeout(1800)


def played(cases: Sequence[Any], ranks: int = 4) -> dict[Any, list[str]]:
    """What is wrong in each case on any of the ranks, by case."""
    results = launch_workers(play, (tuple(cases),), workers=ranks, threads=1)
    assert all(list(found) == list(cases) for found in results)
    return {
        case: [f"rank {rank}: {what}" for rank, found in enumerate(results) for what in found[case]]
        for case in cases
    }


def cases_of(model: str, **settings: bool) -> list[Any]:
    """Those of a model, each with no more stages than the model has layers."""
    _, graph = captured(model, True)
    cases = list(model_cases(model, len(graph.layer_names), **settings))
    assert {case.schedule for case in cases} == set(SYNCHRONOUS)
    return cases


def assert_nothing_wrong(found: dict[Any, list[str]]) -> None:
    wrong = {str(case): what[:5] for case, what in found.items() if what}
    assert found and not wrong, wrong


@pytest.fixture(scope="module")
def matrix() -> dict[Any, list[str]]:
    """The representative cases, played by one set of workers."""
    return played([*representative(), Case("1f1b", (1, 1), 3, haste=1 + 1e-6)])


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_it_trains_as_one_process(schedule: str, matrix: dict[Any, list[str]]) -> None:
    mine = {
        case: what for case, what in matrix.items() if case.schedule == schedule and case.haste == 1
    }
    assert_nothing_wrong(mine)
    assert len(mine) >= 2


@pytest.fixture(scope="module")
def kinds() -> dict[Any, list[str]]:
    """Cases of every kind, played by one set of workers."""
    return played([case for cases in of_every_kind().values() for case in cases])


@pytest.mark.parametrize("kind", of_every_kind())
def test_every_kind_trains_as_one_process(kind: str, kinds: dict[Any, list[str]]) -> None:
    assert_nothing_wrong({case: kinds[case] for case in of_every_kind()[kind]})


def test_eight_ranks_train_as_one_process() -> None:
    cases = [Case(name, (2, 3, 2, 1), 3, micro_batch_rows=4) for name in ("1f1b", "zb-h1")]
    assert_nothing_wrong(played(cases, ranks=8))


def test_the_matrix_covers_what_it_claims() -> None:
    """All schedules; one to four groups; replicas; several stages; few and odd micro-batches."""
    cases = list(representative())
    assert {case.schedule for case in cases} == set(SYNCHRONOUS)
    assert {len(case.replicas) for case in cases} == {1, 2, 3, 4}
    assert {max(case.replicas) for case in cases} == {1, 2, 3, 4}
    assert {case.rounds for case in cases} == {1, 2, 3}
    assert any(case.micro_batches < len(case.replicas) for case in cases)
    assert any(case.micro_batches % len(case.replicas) for case in cases)
    for flag in ("recompute", "costs", "turned"):
        assert {getattr(case, flag) for case in cases} == {False, True}
    # An even cut of five rows over two or three replicas differs by one row at most.
    cut = [s.slices for case in cases for s in case.plan(13).stages if s.replicas in (2, 3)]
    assert cut and all(max(slices) - min(slices) > 1 for slices in cut)
    folds = (case.plan(13) for case in cases if case.rounds > 1 and max(case.replicas) > 1)
    assert any(len({s.slices for s in plan.stages if s.replicas > 1}) > 1 for plan in folds)


def test_a_millionth_more_is_seen(matrix: dict[Any, list[str]]) -> None:
    """The comparison can fail: a learning rate slightly off shows in the weights of each rank."""
    (wrong,) = (what for case, what in matrix.items() if case.haste != 1)
    after_first = [word for word in wrong if ": 15 rows: value of " in word]
    assert wrong[0] == after_first[0]
    # The other two ranks hold no weights; the loss of the next batch is off on all.
    assert {word.partition(":")[0] for word in after_first} == {"rank 0", "rank 1"}


def test_what_one_rank_refuses_all_do() -> None:
    """Two of the four ranks hold nothing, and cannot know what is in a stage."""
    case = Case("chimera", (1, 1), 3, style="mirrored", model="convolutions", micro_batch_rows=4)
    (wrong,) = played([case]).values()
    assert len(wrong) == 4
    assert all("refused: stage 0 has batch normalisation" in word for word in wrong)


@pytest.mark.slow
def test_the_whole_product() -> None:
    assert_nothing_wrong(played(list(every_case())))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_plans_at_random(seed: int) -> None:
    assert_nothing_wrong(played(list(drawn(100, seed))))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "t5", "llama", "qwen2_tied", "resnet", "convolutions"])
def test_models_train_as_one_process(model: str) -> None:
    """Tied weights, skip tensors, masks and BatchNorm, under every schedule that allows them."""
    found = played(cases_of(model))
    if model in ("resnet", "convolutions"):
        refused = {case: found.pop(case) for case in list(found) if case.schedule in MIRRORED}
        assert refused
        for case, words in refused.items():
            text = f"'{case.schedule}' holds it twice"
            assert words and all("refused" in word and text in word for word in words)
    assert_nothing_wrong(found)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dropping", "gpt2_dropping", "t5_dropping"])
def test_dropout_with_fixed_masks_trains_as_one_process(model: str) -> None:
    assert_nothing_wrong(played(cases_of(model, dropout=True)))


@pytest.mark.slow
def test_autocast_is_as_far_from_one_process_as_rounding_allows() -> None:
    for model in ("deep", "gpt2"):
        assert_nothing_wrong(played(cases_of(model, autocast=True)))
