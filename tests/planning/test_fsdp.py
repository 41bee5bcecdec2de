"""The price of FSDP against the same order of work by hand."""

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.cluster.collectives import all_reduce_s
from penstock.plan.problem import PlanningProblem
from penstock.planning.fsdp import fsdp_price, played_s
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile

DEVICES, PARAMETERS = 4, 8_000_000


def problem(link_bytes_per_s: float, memory_bytes: float = 1e9, batch: int = 4) -> PlanningProblem:
    """Three equal layers, a second of forward and two of backward for a row, on four devices."""
    layer = LayerCost(
        "layer",
        *(Affine(0.0, 1.0),) * 3,
        parameter_bytes=PARAMETERS,
        saved_bytes=Affine(0.0, 20e6),
        workspace_bytes=Affine(0.0, 1e6),
    )
    size = Affine(0.0, 3e6)
    edges = tuple(Edge(i, i + 1, f"x{i}", size, size) for i in range(2))
    profile = ModelProfile("three", (layer,) * 3, edges, step_s_per_byte=1e-8)
    host = Host("h", (Device("gpu", memory_bytes),) * DEVICES, link_bytes_per_s)
    return PlanningProblem(profile, Cluster("c", (host,)), batch, (4,))


def test_messages_pass_behind_computing_except_for_the_first_and_the_last() -> None:
    asked = problem(1e8)
    price = fsdp_price(asked, 4)
    half_s = all_reduce_s(asked.cluster, range(DEVICES), PARAMETERS) / 2
    step_s = 1e-8 * 3 * PARAMETERS / DEVICES
    # Gather 0 and scatter 0; all others take less than a layer computes.
    assert half_s < 0.5
    assert price.iteration_s == pytest.approx(9.0 + 2 * half_s + step_s)
    assert price.waiting_s == pytest.approx(2 * half_s)
    again = fsdp_price(asked, 4, by_block=True)
    assert again.iteration_s == pytest.approx(12.0 + 2 * half_s + step_s)


def test_where_links_are_slow_they_take_the_time_and_each_micro_batch_pays() -> None:
    asked = problem(1e6)
    half_s = all_reduce_s(asked.cluster, range(DEVICES), PARAMETERS) / 2
    # Three gathers, two more in the backward, three scatters; all one after the other but for what
    # computes between the last gather of the forward and the first of the backward.
    once = fsdp_price(asked, 4).iteration_s
    assert 8 * half_s < once < 8 * half_s + 9.0
    twice = fsdp_price(problem(1e6, batch=8), 4).iteration_s
    assert 1.9 * once < twice <= 2 * once
    doubled = fsdp_price(asked, 4, scatter_bytes_per_byte=2.0).iteration_s
    assert doubled == pytest.approx(once + 3 * half_s, rel=0.05)


def test_a_device_holds_its_share_two_whole_layers_with_gradients_and_activations() -> None:
    # Parameters, gradients and two moments of 24 MB over four devices; four times 8 MB whole.
    state, whole = 4 * 3 * PARAMETERS / DEVICES, 4 * PARAMETERS
    kept, again = (fsdp_price(problem(1e9), 4, by_block=by_block) for by_block in (False, True))
    assert kept.peak_memory_bytes == pytest.approx(state + whole + 60e6 + 1e6)
    # By block: two tensors between layers, and what the first layer saves.
    assert again.peak_memory_bytes == pytest.approx(state + whole + 6e6 + 20e6 + 1e6)
    assert kept.fits
    assert not fsdp_price(problem(1e9, kept.peak_memory_bytes - 1), 4).fits
    assert fsdp_price(problem(inf, kept.peak_memory_bytes), 4).fits


SECONDS = st.lists(st.floats(0.0, 3.0), min_size=1, max_size=5)


@settings(max_examples=100, deadline=None)
@given(SECONDS, SECONDS, st.integers(1, 3))
def test_neither_computing_nor_messages_are_faster_than_alone(
    messages_s: list[float], work_s: list[float], micro_batches: int
) -> None:
    count = min(len(messages_s), len(work_s))
    gathers_s, works_s = messages_s[:count], work_s[:count]
    found = played_s(gathers_s, gathers_s, works_s, works_s, micro_batches)
    computing_s = 2 * micro_batches * sum(works_s)
    # The last layer is gathered once, all others twice.
    sent_s = micro_batches * (3 * sum(gathers_s) - gathers_s[-1])
    assert max(computing_s, sent_s) - 1e-9 <= found <= computing_s + sent_s + 1e-9
