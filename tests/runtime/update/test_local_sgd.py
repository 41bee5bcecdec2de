"""Pipelines that train alone and meet have the weights of a plain loop over copies of the model."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plain_training import plain_step
from runtime.update.meeting_cases import (
    MeetingCase,
    distances_under_other_schedules,
    loaded_by_one,
    loaded_with_an_outer_step,
    model_of,
    pipeline_of,
    plain_loop,
    refusals,
    refused_models,
    resumed,
    skipped,
    too_few_rows,
    trained,
    written_by_two,
)

from penstock.costs.sharding import with_sharding
from penstock.errors import BadInput
from penstock.plan.plan import Plan, Stage
from penstock.plan.side_by_side import pipelines_in
from penstock.runtime.options import Safety, Update
from penstock.runtime.processes.launch import launch_workers
from penstock.runtime.tables import Constraints

LIMIT = 1e-12

CASES = (
    *(MeetingCase(every, 64) for every in (1, 8, 64)),
    *(MeetingCase(every, 64, 0.7, 0.9, adam=True) for every in (1, 8, 64)),
    MeetingCase(4, 10, 0.7, 0.9, slices=(1, 3), clip_norm=0.2),
    MeetingCase(4, 10, slices=(3, 1), adam=True, transport="process-groups"),
    MeetingCase(3, 9, 0.5),
)


def test_weights_are_those_of_a_plain_loop() -> None:
    found = launch_workers(trained, (CASES,), workers=4, threads=1)
    for case in CASES:
        models, numbers = plain_loop(case)
        for rank, of_rank in enumerate(found):
            weights, metrics, steps = of_rank[case]
            assert steps == case.steps
            expected = dict(models[rank % 2].named_parameters())
            for name, weight in weights.items():
                assert (weight - expected[name]).abs().max() <= LIMIT, (case, name)
            for own, (loss, norm) in zip(metrics, numbers, strict=True):
                assert own == pytest.approx((loss, norm), rel=1e-9)
        assert any(of_rank[case][0] for of_rank in found)


def test_other_schedules_steps_of_several_batches_and_a_rank_without_stages() -> None:
    case = MeetingCase(2, 4, 0.7, 0.9)
    found = launch_workers(distances_under_other_schedules, (case,), workers=5, threads=1)
    for of_rank in found:
        assert set(of_rank) == {"interleaved", "zb-h1", "accumulated"}
        assert max(of_rank.values()) <= LIMIT


def test_models_that_exchange_more_than_weights_are_refused() -> None:
    for found in launch_workers(refused_models, (MeetingCase(2, 1),), workers=4, threads=1):
        normed, tied, frozen = found
        assert normed.endswith("does not work with meet_every; use another norm, such as GroupNorm")
        assert "parameter '0.weight', which stages [0, 1] use does not work with" in tied
        assert tied.endswith("put the layers that use it into one stage, or untie it")
        assert "a change of requires_grad of" in frozen
        assert "does not work with meet_every=2: what is trained is fixed" in frozen


def test_meeting_after_every_step_is_data_parallelism_for_sgd() -> None:
    case = CASES[0]
    model = model_of()
    optimizer = case.optimizer(list(model.parameters()))
    for step in range(case.steps):
        x, y = case.batch(step)
        plain_step(optimizer, torch.nn.functional.mse_loss(model(x), y))
    (of_rank, *_) = launch_workers(trained, ((case,),), workers=4, threads=1)
    expected = dict(model.named_parameters())
    for name, weight in of_rank[case][0].items():
        assert (weight - expected[name]).abs().max() <= LIMIT


def test_a_run_resumed_between_meetings_ends_with_equal_weights(tmp_path: Path) -> None:
    diloco = MeetingCase(4, 11, 0.7, 0.9, adam=True)
    for number, (case, at) in enumerate([(diloco, 6), (diloco, 8), (MeetingCase(4, 7), 3)]):
        folder = tmp_path / str(number)
        found = launch_workers(resumed, (folder, case, at), workers=4, threads=1)
        assert found == ((True, True),) * 4


def test_what_needs_one_model_is_refused_between_meetings() -> None:
    for found in launch_workers(refusals, (MeetingCase(4, 2),), workers=4, threads=1):
        assert found == [
            f"{what} needs weights that all pipelines share, and they have trained alone since "
            f"they met (every 4 steps); call meet() before, on all ranks"
            for what in ("model_state_dict()", "verify()")
        ]


def test_a_step_without_a_row_for_a_pipeline_is_refused() -> None:
    for found in launch_workers(too_few_rows, (MeetingCase(4, 2),), workers=4, threads=1):
        assert found == (
            "a step on 1 sample has none for pipeline 1, and each of 2 trains on rows of its own; "
            "give larger batches"
        )


def test_a_step_whose_numbers_are_bad_in_one_pipeline_is_left_out_in_all() -> None:
    for rank, (left_out, unchanged) in enumerate(launch_workers(skipped, (), workers=4, threads=1)):
        assert left_out == (
            "it appeared first in the forward of layer '0' (stage 0, rank 1, micro-batch 0); "
            "tensor 0 of the batch has NaN in row 3"
        ), rank
        assert unchanged


def test_another_number_of_pipelines_goes_on_from_the_first(tmp_path: Path) -> None:
    weights, *_ = launch_workers(written_by_two, (tmp_path,), workers=4, threads=1)
    loaded, warned = loaded_by_one(tmp_path)
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())
    assert warned == [
        "the checkpoint of step 3 was written while 2 pipelines trained alone; the first one's "
        "weights go on, and what the others have learned since they met is lost"
    ]


def test_an_outer_step_begins_at_a_meeting(tmp_path: Path) -> None:
    found = launch_workers(loaded_with_an_outer_step, (tmp_path,), workers=4, threads=1)
    for at_a_meeting, after_it in found:
        assert at_a_meeting == ""
        assert after_it.startswith("the checkpoint was written between meetings that have no outer")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"meet_every": -1}, "meet_every is -1; it must be a number of steps, or 0 for never"),
        ({"outer_learning_rate": 0.0}, "outer_learning_rate is 0.0; it must be > 0"),
        ({"outer_momentum": 1.0}, "outer_momentum is 1.0; it must be >= 0 and below 1"),
        ({"outer_momentum": 0.9}, "set meet_every to a number of steps, or leave them out"),
    ],
)
def test_settings_without_a_meaning(given: dict[str, float], message: str) -> None:
    with pytest.raises(BadInput) as problem:
        Update(**given)  # type: ignore[arg-type]
    assert str(problem.value).endswith(message)


def test_stages_that_are_no_replicas_of_each_other() -> None:
    def plan(*slices: tuple[int, ...], in_turn: bool = False) -> Plan:
        devices = iter(range(9))
        stages = [
            Stage(range(n, n + 1), tuple(next(devices) for _ in own), own, in_turn=in_turn)
            for n, own in enumerate(slices)
        ]
        return Plan(tuple(stages), 2, slices[0][0] if in_turn else sum(slices[0]), "1f1b")

    assert pipelines_in(plan((1, 3), (1, 3), (1, 3))) == ((0, 2, 4), (1, 3, 5))
    for slices in ((2, 2), (4,)), ((2, 2), (1, 3)):
        with pytest.raises(BadInput, match=r"stage 0 has slices \[2, 2\] and stage 1"):
            pipelines_in(plan(*slices))
    whole = plan((4, 4), (4, 4), in_turn=True)
    with pytest.raises(BadInput, match="replicas of the plan take whole ones in turn"):
        pipelines_in(whole)
    with pytest.raises(BadInput, match="the plan is one pipeline"):
        pipelines_in(plan((4,), (4,)))


def test_what_does_not_go_together_is_refused_before_ranks_meet() -> None:
    case = CASES[3]
    for given, words in (
        (
            {"constraints": Constraints(sharding="optimizer")},
            'sharding="optimizer" does not work with meet_every=1',
        ),
        ({"safety": Safety(verify_every=5)}, "verify_every=5 does not work with meet_every=1"),
        ({"safety": Safety(transport="in-process")}, "replicas of a stage are one there"),
        ({"autocast": torch.float16}, "pipelines would have scales of their own; use bfloat16"),
        (
            {"plan": replace(case.plan, schedule="pipedream")},
            "it has no flush.* does not work with meet_every=1: pipelines meet after a step",
        ),
        (
            {"plan": replace(case.plan, schedule="chimera")},
            "it holds stages twice.* does not work with meet_every=1",
        ),
        (
            {"plan": with_sharding(case.plan, "parameters")},
            "divided parameters does not work with meet_every=1",
        ),
    ):
        with pytest.raises(BadInput, match=words):
            pipeline_of(case, **given)
