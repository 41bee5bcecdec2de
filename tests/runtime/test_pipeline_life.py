"""Pipelines begin and end without leaving anything behind, in any order, also where they fail."""

import errno
import os
from typing import Any

import pytest
import torch
from plain_training import plain_step
from runtime.pipeline_life_cases import BATCH, COUNTED, SGD, failed, lives
from torch import nn
from torch.nn import functional

from penstock.runtime.processes.heartbeat import link_is_cut
from penstock.runtime.processes.launch import launch_workers

pytestmark = pytest.mark.timeout(900)

# The heap settles for a while; a pipeline of these tests shares 100 KiB or more.
RESIDENT_BYTES = 4 << 20

CAUSES = {
    "in a step": "shape mismatch in the user's code",
    "when built": "no optimizer of this name",
    "to open memory": "None",
}


@pytest.fixture(scope="module")
def found() -> tuple[dict[str, Any], ...]:
    """What both ranks have seen."""
    return launch_workers(lives, (5,), workers=2, threads=1)


def assert_flat(by_case: dict[str, Any], what: str) -> None:
    for case, (texts, (early, late)) in by_case.items():
        assert all(CAUSES[case] in text for text in texts), f"{what}, {case}: {texts}"
        for thing in COUNTED:
            assert late[thing] <= early[thing], f"{what}, {case}: {thing} {early} -> {late}"
        grown = late["resident"] - early["resident"]
        assert grown <= RESIDENT_BYTES, f"{what}, {case}: {grown} bytes more"


def test_failed_pipelines_leave_nothing_open(found: tuple[dict[str, Any], ...]) -> None:
    for rank, seen in enumerate(found):
        for transport, by_case in seen["failed"].items():
            assert_flat(by_case, f"rank {rank}, {transport}")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared-memory", "process-groups"])
def test_fifty_failed_pipelines_leave_nothing_open(transport: str) -> None:
    for rank, by_case in enumerate(launch_workers(failed, (transport, 50), workers=2, threads=1)):
        assert_flat(by_case, f"rank {rank}")


def test_a_model_in_an_open_pipeline_is_refused_another(found: tuple[dict[str, Any], ...]) -> None:
    for seen in found:
        whole, part, after = seen["one model"]
        for said in (whole, part):
            assert "linear.weight' is in another open pipeline" in said
            assert "close(gather=True)" in said and "copy.deepcopy" in said
        assert after == "fell"


def test_two_pipelines_of_a_process_are_closed_in_any_order(
    found: tuple[dict[str, Any], ...],
) -> None:
    assert [seen["two at once"] for seen in found] == [[], []]


def test_no_thread_of_gloo_outlives_a_pipeline(found: tuple[dict[str, Any], ...]) -> None:
    """One that frees tensors when Python ends would abort the process."""
    for seen in found:
        for name, (opened, left, refused) in seen["threads"].items():
            assert opened > 0 == left, f"{name}: {opened} threads, then {left}"
            assert refused.startswith("RunFailed: the pipeline was closed"), f"{name}: {refused}"


def test_a_rank_leaves_although_its_thread_of_gloo_waits(found: tuple[dict[str, Any], ...]) -> None:
    assert found[0]["left"] < 20


def test_a_callback_that_raises_at_closing_keeps_nothing_from_closing(
    found: tuple[dict[str, Any], ...],
) -> None:
    for seen in found:
        raised = "raw ValueError: no space left for the log"
        assert seen["callback"] == [raised, ["Closing"], False, 0]


def test_an_unexpected_error_of_one_rank_is_told_to_all(found: tuple[dict[str, Any], ...]) -> None:
    text = "list index out of range"
    assert found[0]["agreements"] == [f"RunFailed: rank 1 failed with IndexError: {text}", "again"]
    assert found[1]["agreements"] == [f"raw IndexError: {text}", "again"]


def test_a_failure_while_outputs_are_gathered_is_told_to_all(
    found: tuple[dict[str, Any], ...],
) -> None:
    assert found[0]["prediction"].startswith("RunFailed: rank 0 stopped: rank 1: the outputs are")
    assert found[1]["prediction"] == "raw ValueError: the outputs are gone"


def test_only_batch_norm_needs_a_second_group_of_the_replicas(
    found: tuple[dict[str, Any], ...],
) -> None:
    plain, with_norm = found[0]["groups"]
    assert with_norm == plain + 1


@pytest.mark.parametrize("name", ["gathered", "copied"])
def test_a_rank_that_sends_nothing_is_noticed(name: str, found: tuple[dict[str, Any], ...]) -> None:
    text, seconds = found[0]["late"][name]
    assert text.startswith("Stalled: rank 0 waited 1 s for ")
    assert seconds < 30


def test_errors_of_torch_are_told_apart(found: tuple[dict[str, Any], ...]) -> None:
    """A sum and a message that come too late, and a rank that has left."""
    assert found[0]["texts"] == [(True, False), (True, False), (False, True)]
    network = "recvValueWithTimeout failed on TCPStore(10.0.0.1): "
    assert link_is_cut(RuntimeError(network + os.strerror(errno.ETIMEDOUT)))
    assert not link_is_cut(RuntimeError(network + os.strerror(errno.ECONNRESET)))


def test_a_model_that_is_given_back_can_be_trained_again(found: tuple[dict[str, Any], ...]) -> None:
    torch.manual_seed(0)
    own = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer, expected = SGD(own.parameters()), list[float]()
    for _ in range(4):
        expected.append(plain_step(optimizer, functional.mse_loss(own(BATCH[0]), BATCH[1])))
    for seen in found:
        _, same, losses = seen["again"]
        assert same
        assert losses == pytest.approx(expected, rel=1e-5)
    words = "has no values on this rank: an earlier Pipeline of the model had it on another; end"
    assert all(words in seen["again"][0] for seen in found)
