"""A bit that flips in one copy of a weight is noticed, and nothing is where no bit flips."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runtime.replica_cases import FlipCase, noticed

from penstock.errors import BadInput
from penstock.runtime.options import Safety
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.processes.launch import launch_workers
from penstock.runtime.replica_check import bit_sum

TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)


@given(st.sampled_from(TYPES), st.integers(1, 40), st.integers(0, 3), st.integers(0, 10**6))
def test_every_single_bit_changes_the_sum(
    kind: torch.dtype, size: int, offset: int, place: int
) -> None:
    tensor = torch.arange(size + offset).to(kind)[offset:]
    before = int(bit_sum(tensor))
    assert int(bit_sum(tensor.clone())) == before
    bits = tensor.clone().view(torch.uint8)
    bits[place % len(bits)] ^= 1 << place % 8
    assert int(bit_sum(bits.view(kind))) != before


def test_a_flipped_bit_is_noticed_on_every_rank_before_the_next_comparison_is_over() -> None:
    three = FlipCase((3,), rank=1)
    two = FlipCase((1, 2), rank=2)
    cases = (three, two, FlipCase((1, 2)), FlipCase((2, 1), every=0, rank=0))
    found = launch_workers(noticed, (cases,), workers=3, threads=1)
    assert found[0] == found[1] == found[2]
    # Compared before steps 2, 4 and 6.
    steps, message = found[0][three]
    assert steps == 3
    assert message.startswith(
        "ReplicasDiffer: the copies of weight '6.linear.weight' (stage 0) differ before step 4: "
        "that of rank 1 is not that of ranks 0, 2;"
    )
    assert message.endswith(
        "resume from a checkpoint of at most step 2, when the copies were equal"
    )
    steps, message = found[0][two]
    assert steps == 3
    assert "(stage 1) differ before step 4: ranks 1, 2 disagree, and no majority shows" in message
    for case in cases[2:]:
        assert found[0][case] == (6, "nothing")


def test_copies_are_compared_under_other_schedules_and_settings() -> None:
    mirrored = FlipCase((1, 1), rank=0, schedule="chimera")
    cases = (
        mirrored,
        FlipCase((2,), sharded=True, every=1),
        FlipCase((2,), schedule="zb-h1"),
    )
    found, other = launch_workers(noticed, (cases,), workers=2, threads=1)
    assert found == other
    assert found[mirrored][0] == 3 and "that" not in found[mirrored][1].split(":")[0]
    assert "weight '6.weight' (stage 1) differ before step 4" in found[mirrored][1]
    for case in cases[1:]:
        assert found[case] == (6, "nothing")


def test_a_negative_number_of_steps_is_refused() -> None:
    with pytest.raises(BadInput, match="compare_replicas_every is -1; it must be"):
        Pipeline(torch.nn.Linear(1, 1), None, plan=None, safety=Safety(compare_replicas_every=-1))  # type: ignore[arg-type]
