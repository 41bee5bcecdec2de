"""A plan is said in the words that people have for it."""

from dataclasses import replace

import pytest

from penstock.plan.plan import Plan, Stage, plan_words


def plan(*groups: tuple[int, ...], schedule: str = "1f1b", again: tuple[int, ...] = ()) -> Plan:
    """One layer a stage, on these devices, with four micro-batches of 16 samples."""
    stages = tuple(
        Stage(range(k, k + 1), devices, (16 // len(devices),) * len(devices), k in again)
        for k, devices in enumerate(groups)
    )
    return Plan(stages, 4, 16, schedule)


PAIRS = tuple((2 * k, 2 * k + 1) for k in range(4))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (plan((0,)), "the whole model on 1 device"),
        (plan((0, 1)), "DDP over 2 devices"),
        (plan((0, 1), again=(0,)), "DDP over 2 devices, activations recomputed"),
        (
            plan((0, 1), (0, 1), (0, 1), schedule="interleaved"),
            "DDP over 2 devices, gradients summed in 3 parts",
        ),
        (plan((0,), (1,)), "2 stages, 1f1b"),
        (plan(*PAIRS, schedule="zb-h1"), "4 stages x 2 replicas, zb-h1"),
        (
            plan(*PAIRS, *PAIRS, schedule="interleaved", again=(7,)),
            "8 stages x 2 replicas, 2 on each device, interleaved, activations recomputed in 1",
        ),
        (plan((0,), (1, 2), (3,)), "3 stages on 1 + 2 + 1 devices, 1f1b"),
        (
            plan(*((k,) for k in range(6)), (6, 7)),
            "7 stages on 1 to 2 devices, 1f1b",
        ),
        (plan((0,), (1,), schedule="chimera"), "2 stages, each held twice, chimera"),
        (
            replace(plan((0,), (1,)), tensor_groups=((0, 1), (2, 3))),
            "2 stages, each device is 2 ranks, 1f1b",
        ),
    ],
)
def test_a_plan_in_words(given: Plan, words: str) -> None:
    assert plan_words(given) == f"{words}; 4 micro-batches of 16 samples"
    assert plan_words(given, "worker") == plan_words(given).replace("device", "worker")


def test_one_is_no_plural() -> None:
    one = Plan((Stage(range(1), (0,), (1,)),), 1, 1, "1f1b")
    assert plan_words(one) == "the whole model on 1 device; 1 micro-batch of 1 sample"
