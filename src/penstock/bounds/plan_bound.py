"""Seconds that no order of work of one plan beats: fast enough to ask for every plan."""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from penstock.bounds.least_cost import floor_of
from penstock.cluster.collectives import BUCKET_BYTES, all_reduce_costs
from penstock.cluster.link_matrices import link_matrices
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.plan.problem_memo import recalled, remembered
from penstock.profile.model_profile import Edge, ModelProfile

__all__ = ["plan_bound_s"]


@dataclass(frozen=True)
class Prepared:
    """What the bounds of all plans of a problem share.

    ``sums``: prefix sums over the layers of the forward (fixed, per sample), the backward (fixed,
    per sample) and the parameter bytes. ``near``: for each cut the tensors made right before it,
    each with its nearest reader. ``receive_rates``: the best link into each device. ``bucket_s``,
    ``stages`` and ``messages`` keep answers.
    """

    sums: tuple[tuple[float, ...], ...]
    near: tuple[tuple[Edge, ...], ...]
    receive_rates: tuple[float, ...]
    bucket_s: dict[tuple[int, ...], float]
    stages: dict[tuple[object, ...], tuple[float, ...]]
    messages: dict[tuple[object, ...], tuple[float, ...]]


@remembered
def prepare(problem: PlanningProblem) -> Prepared:
    """What the bounds of all plans of ``problem`` share."""
    layers = problem.profile.layers
    costs = (
        [layer.forward_s.fixed for layer in layers],
        [layer.forward_s.per_sample for layer in layers],
        [layer.backward_s.fixed for layer in layers],
        [layer.backward_s.per_sample for layer in layers],
        [float(layer.parameter_bytes) for layer in layers],
    )
    rates = link_matrices(problem.cluster).bytes_per_s
    np.fill_diagonal(rates, 0.0)
    return Prepared(
        sums=tuple(tuple(accumulate(cost, initial=0.0)) for cost in costs),
        near=near_edges(problem.profile),
        receive_rates=tuple(rates.max(axis=0).tolist()),
        bucket_s={},
        stages={},
        messages={},
    )


def near_edges(profile: ModelProfile) -> tuple[tuple[Edge, ...], ...]:
    """For each cut the tensors of the layer right before it, with their nearest readers."""
    nearest: list[dict[str, Edge]] = [{} for _ in range(len(profile.layers) + 1)]
    for edge in sorted(profile.edges, key=lambda edge: edge.consumer):
        nearest[edge.producer + 1].setdefault(edge.tensor, edge)
    return tuple(tuple(edges.values()) for edges in nearest)


def plan_bound_s(problem: PlanningProblem, plan: Plan) -> float:
    """Seconds that no order of whole forwards and backwards can beat for ``plan``.

    The largest of three terms over all stages. ``A`` are the forwards of the fastest replica of
    every earlier stage, ``P = F + B`` is of the slowest replica of this stage, and ``D`` are the
    seconds in which its links receive a micro-batch:

        A + M * P + W              busy between fill and what follows the last backward
        A + M * P - B + T          its gradients: T from the start of the last backward on
        A + M * D + B + W          its links

    ``T = max(B, B until the first bucket is full + all-reduce) + step``. ``W`` becomes
    ``max(T, B + W)`` from stage to stage: the drain, or an earlier stage's all-reduce that starts
    in the drain. Between single devices ``A`` and ``W`` count the messages too. ``D`` counts the
    tensors made right before the cut.
    """
    known = prepare(problem)
    batches = plan.micro_batches
    bound_s = first_s = after_s = 0.0
    before: Stage | None = None
    for stage in plan.stages:
        fast_s, back_s, fast_tail_s, slow_whole_s, slow_tail_s = stage_times(known, problem, stage)
        if before is not None:
            down_s, up_s, received_s = messages(known, problem, before, stage)
            bound_s = max(bound_s, first_s + batches * received_s + back_s + up_s + after_s)
            first_s += down_s
            after_s += up_s
        busy_s = batches * slow_whole_s
        bound_s = max(bound_s, first_s + busy_s + max(after_s, slow_tail_s))
        first_s += fast_s
        after_s = max(fast_tail_s, back_s + after_s)
        before = stage
    return bound_s


def stage_times(known: Prepared, problem: PlanningProblem, stage: Stage) -> tuple[float, ...]:
    """The times of a stage for `plan_bound_s`.

    Over all replicas, the least forward, the least backward, and the least time from the start of
    the last backward to the end. Of the slowest replica, forward and backward together, and the
    time from its last backward to the end of its gradients and step.
    """
    key = (stage.layers.start, stage.layers.stop, stage.devices, stage.slices)

    def computed() -> tuple[float, ...]:
        replicas = replica_times(known, problem, stage)
        slow = max(replicas, key=lambda times: times.whole_s)
        return (
            min(times.forward_s for times in replicas),
            min(times.backward_s for times in replicas),
            min(gradient_tail_s(known, problem, stage, times) for times in replicas),
            slow.whole_s,
            gradient_tail_s(known, problem, stage, slow) - slow.backward_s,
        )

    return recalled(known.stages, key, computed)


@dataclass(frozen=True, slots=True)
class ReplicaTimes:
    """One micro-batch on one replica, and what its device and rows are."""

    forward_s: float
    backward_s: float
    rows: int
    speed: float

    @property
    def whole_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


def replica_times(known: Prepared, problem: PlanningProblem, stage: Stage) -> list[ReplicaTimes]:
    """The times of the replicas that differ."""
    devices = problem.cluster.devices
    lo, hi = stage.layers.start, stage.layers.stop
    fixed_f, row_f, fixed_b, row_b = (sums[hi] - sums[lo] for sums in known.sums[:4])
    kinds = {
        (rows, devices[device].speed)
        for device, rows in zip(stage.devices, stage.slices, strict=True)
    }
    return [
        ReplicaTimes(
            max(0.0, fixed_f + row_f * rows) / speed,
            max(0.0, fixed_b + row_b * rows) / speed,
            rows,
            speed,
        )
        for rows, speed in kinds
    ]


def messages(
    known: Prepared, problem: PlanningProblem, before: Stage, stage: Stage
) -> tuple[float, ...]:
    """Least seconds of the messages between two stages: down, up, and received by some replica.

    Only tensors of the layer right before the cut count, which are surely for this stage.
    """
    rows = sum(stage.slices)
    key = (stage.layers.start, stage.layers.stop, before.devices, stage.devices, rows)
    return recalled(
        known.messages, key, lambda: messages_of_cut(known, problem, before, stage, rows)
    )


def messages_of_cut(
    known: Prepared, problem: PlanningProblem, before: Stage, stage: Stage, rows: int
) -> tuple[float, ...]:
    """`messages`, computed."""
    edges = [edge for edge in known.near[stage.layers.start] if edge.consumer in stage.layers]
    transfer_s = problem.cluster.transfer_s
    if before.replicas == stage.replicas == 1:
        one, other = before.devices[0], stage.devices[0]
        back_rows = [1 if edge.goes_whole else rows for edge in edges]
        down_s = sum(transfer_s(one, other, edge.bytes.at(rows)) for edge in edges)
        up_s = sum(
            transfer_s(other, one, edge.gradient_bytes.at(n))
            for edge, n in zip(edges, back_rows, strict=True)
        )
        return down_s, up_s, down_s
    rate = sum(known.receive_rates[device] for device in stage.devices)
    if any(host.separate_links for host in problem.cluster.hosts):
        # A device there receives from every sender at once.
        rate *= before.replicas
    floors = [floor_of(edge.bytes, rows) for edge in edges]
    return 0.0, 0.0, sum(size.at(rows) for size in floors) / rate


def gradient_tail_s(
    known: Prepared, problem: PlanningProblem, stage: Stage, slow: ReplicaTimes
) -> float:
    """Least seconds from the start of the last backward to the end of the optimizer's step.

    Gradients come from the last layer on; nothing is reduced before `BUCKET_BYTES` are there.
    """
    lo, hi = stage.layers.start, stage.layers.stop
    _, _, fixed, per_row, parameters = known.sums
    size_bytes = parameters[hi] - parameters[lo]
    fastest = max(problem.cluster.devices[device].speed for device in stage.devices)
    step_s = size_bytes * problem.profile.step_s_per_byte / fastest
    if stage.replicas == 1 or size_bytes <= 0:
        return slow.backward_s + step_s
    # The first bucket ends with the last layer from which on enough bytes are there.
    full = bisect_right(parameters, parameters[hi] - BUCKET_BYTES) - 1
    full = max(full, lo)
    while full < hi - 1 and parameters[full + 1] == parameters[full]:
        full += 1
    ready_s = max(0.0, fixed[hi] - fixed[full] + (per_row[hi] - per_row[full]) * slow.rows)
    reduce_s = size_bytes / BUCKET_BYTES * bucket_s(known, problem, stage)
    return max(slow.backward_s, ready_s / slow.speed + reduce_s) + step_s


def bucket_s(known: Prepared, problem: PlanningProblem, stage: Stage) -> float:
    """Seconds to reduce one full bucket; smaller ones take more for each byte."""

    def computed() -> float:
        costs = all_reduce_costs(problem.cluster, stage.devices)
        return min(cost.latency_s + cost.s_per_byte * BUCKET_BYTES for cost in costs)

    return recalled(known.bucket_s, stage.devices, computed)
