"""The price of FSDP: seconds and bytes of data parallelism in which devices divide everything.

Every device keeps a share of each layer's parameters, gradients and optimizer state (ZeRO-3:
Rajbhandari et al., SC 2020; Zhao et al., PyTorch FSDP, VLDB 2023). A layer is gathered before its
forward and again before its backward; its gradients are summed and scattered after its backward.
Here computing and messages each go in order, beside one another:

    forward    gather 0, gather 1, ...                    layer i waits for gather i
    backward   gather n, gather n-1, scatter n, ...       layer i waits for gather i

One layer is gathered ahead of the one that computes, so two are whole at a time. A gather and a
scatter are each half an all-reduce (`penstock.cluster.collectives`). Each micro-batch does all of
this, and its sums are not awaited before the next one begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.cluster.collectives import all_reduce_s
from penstock.plan.cost import RunCosts, crowding, rows_by_speed, run_costs
from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import ModelProfile

__all__ = ["FsdpPrice", "fsdp_price"]


@dataclass(frozen=True, slots=True)
class FsdpPrice:
    """Seconds of an iteration, of which so many pass while devices wait for messages; peak bytes.

    ``fits``: every device has the memory.
    """

    iteration_s: float
    waiting_s: float
    peak_memory_bytes: float
    fits: bool


def fsdp_price(
    problem: PlanningProblem,
    size: int,
    *,
    by_block: bool = False,
    scatter_bytes_per_byte: float = 1.0,
) -> FsdpPrice:
    """The price on all devices of ``problem`` with micro-batches of ``size`` samples.

    With ``by_block`` layers recompute. ``scatter_bytes_per_byte`` are the bytes of gradients in
    messages for each byte of parameters: 2 where bfloat16 is summed as float32. Parameters that
    layers share count with the first of them.
    """
    cluster, profile = problem.cluster, problem.profile
    profile = profile.by_block if by_block else profile
    devices = tuple(range(len(cluster.devices)))
    rows = rows_by_speed(cluster, devices, size)
    kinds = {(n, cluster.devices[d].speed) for n, d in zip(rows, devices, strict=True)}
    crowded = crowding(cluster, devices)

    def slowest_s(layer: int, *, forward: bool) -> float:
        cost = profile.layers[layer].forward_s if forward else profile.layers[layer].backward_s
        return crowded * max(cost.at(n) / speed for n, speed in kinds)

    sizes = whole_bytes(profile)
    gathers_s = [all_reduce_s(cluster, devices, of_one) / 2 for of_one in sizes]
    scatters_s = [
        all_reduce_s(cluster, devices, of_one * scatter_bytes_per_byte) / 2 for of_one in sizes
    ]
    layers = range(len(sizes))
    forwards_s = [slowest_s(layer, forward=True) for layer in layers]
    backwards_s = [slowest_s(layer, forward=False) for layer in layers]
    count = problem.global_batch // size
    slowest = min(device.speed for device in cluster.devices)
    forwards_s[0] += profile.stage_forward_s * crowded / slowest
    backwards_s[-1] += profile.stage_backward_s * crowded / slowest
    step_s = profile.step_s_per_byte * sum(sizes) * crowded / slowest / len(devices)
    passed_s = played_s(gathers_s, scatters_s, forwards_s, backwards_s, count)
    compute_s = count * (sum(forwards_s) + sum(backwards_s))
    run = run_costs(problem, range(len(sizes)), max(rows), by_block)
    needed = device_bytes(run, sizes, len(devices))
    limit = min(device.memory_bytes for device in cluster.devices)
    return FsdpPrice(passed_s + step_s, passed_s - compute_s, needed, needed <= limit)


def whole_bytes(profile: ModelProfile) -> list[float]:
    """Bytes of each layer's parameters, what layers share with the first of them."""
    sizes = [float(layer.parameter_bytes) for layer in profile.layers]
    for shared in profile.shared:
        sizes[min(shared.layers)] += shared.bytes
    return sizes


def played_s(
    gathers_s: Sequence[float],
    scatters_s: Sequence[float],
    forwards_s: Sequence[float],
    backwards_s: Sequence[float],
    micro_batches: int,
) -> float:
    """Seconds of all micro-batches: computing in one order, messages in another beside it."""
    free_s = now_s = 0.0  # when messages are over, and computing
    forward = list(range(len(gathers_s)))
    backward = forward[::-1]
    for _ in range(micro_batches):
        ends_s = [now_s, now_s]
        for layer in forward:
            # The layer two before has computed, so its place is free.
            free_s = max(free_s, ends_s[-2]) + gathers_s[layer]
            ends_s.append(max(ends_s[-1], free_s) + forwards_s[layer])
        ends_s = [ends_s[-1], ends_s[-1]]
        for place, layer in enumerate(backward):
            free_s = max(free_s, ends_s[-2])
            if place >= 2:
                free_s += scatters_s[backward[place - 2]]
            # The last layer of the forward is still whole.
            free_s += gathers_s[layer] if place else 0.0
            ends_s.append(max(ends_s[-1], free_s) + backwards_s[layer])
        now_s = ends_s[-1]
        for place in range(len(backward))[-2:]:
            free_s = max(free_s, ends_s[2 + place]) + scatters_s[backward[place]]
    return max(now_s, free_s)


def device_bytes(run: RunCosts, sizes: Sequence[float], devices: int) -> float:
    """Peak bytes of a device: its share, two whole layers and their gradients, activations."""
    largest = max((a + b for a, b in pairwise(sizes)), default=sum(sizes))
    return run.state_bytes / devices + 2 * largest + run.saved_bytes + run.workspace_bytes
