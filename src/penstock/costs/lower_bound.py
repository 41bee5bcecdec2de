"""Times that no plan can beat; and for one plan, the time that no order of its work beats.

The latter is fast enough to compute for every plan.
"""

from dataclasses import dataclass
from itertools import chain
from math import inf

import numpy as np

from penstock.cluster.collectives import BUCKET_BYTES, all_reduce_costs
from penstock.cluster.link_matrices import link_matrices
from penstock.core.native import Layers, held_bytes
from penstock.costs.link_bound import Core, floor_of, host_speeds, least_per_sample, link_bound
from penstock.costs.run_tables import layers_in_core
from penstock.plan.plan import SHARDINGS, Plan, Stage
from penstock.plan.problem import PlanningProblem, recalled, remembered, remembered_by_schedules
from penstock.profile.model_profile import Edge, ModelProfile
from penstock.schedule.registry import FAMILIES
from penstock.text import size_text

WHOLE_BACKWARDS = "whole backwards, one stage a device"
ANY_ORDER = "whole or split backwards, any stages a device, either direction"
WHOLE_PARAMETERS = ", parameters not divided"
"""The plans and orders that a bound is about."""

MEMORY_ROUNDING = 1e-9
"""Memory that is short by a smaller share counts as enough."""


@dataclass(frozen=True, slots=True)
class LowerBound:
    """Seconds that no plan beats, and in words what they are spent on.

    ``covers`` says for which plans and orders the bound holds; empty: for all there are.
    """

    seconds: float
    argument: str
    covers: str = ""


@remembered_by_schedules
def lower_bound(problem: PlanningProblem) -> LowerBound:
    """The bound on every plan of ``problem``: any stages, devices, slices, recompute and order.

    The answer is the least over the micro-batch sizes. For each it is the largest of the bounds of
    `bound_of_size`, and of `penstock.costs.link_bound` if all schedules allowed flush. The latter
    holds where devices keep whole parameters, so it is left out where all divide them. It is
    infinite where the parameters of some layer fit on no device.

    The orders depend on the schedules that the problem allows; ``covers`` of the answer names them.
    If all have whole backwards and one stage a device, the bound holds for the orders of such plans
    only. Otherwise it holds for every order of whole or split backwards, any stages a device, one
    or both directions.
    """
    if problem.state_on != "device":
        bounds = (lower_bound(problem.with_state_on(place)) for place in problem.places)
        return min(bounds, key=lambda bound: bound.seconds)
    flushes = all(FAMILIES[name].flushes for name in problem.schedules)
    covers = (WHOLE_BACKWARDS if has_whole_backwards(problem) else ANY_ORDER) if flushes else ""
    # Messages of divided parameters do not wait for others (`penstock.costs.sharding`).
    linked = flushes and problem.sharding != "parameters"
    fattest = max(problem.profile.layers, key=lambda layer: layer.parameter_bytes)
    largest = max(device.memory_bytes for device in problem.cluster.devices)
    size, state = float(fattest.parameter_bytes), problem.optimizer_bytes_per_parameter_byte
    devices = len(problem.cluster.devices)
    kept = ("", 1), *((sharding, devices) for sharding in problem.shardings)
    least = min(
        held_bytes(SHARDINGS.index(sharding), count, size, size, 2.0, state)
        for sharding, count in kept
    )
    if least > largest * (1 + MEMORY_ROUNDING):
        return LowerBound(inf, f"memory: layer '{fattest.name}' fits no device", covers)
    found: list[LowerBound] = []
    for size in problem.micro_batch_sizes:
        bound = bound_of_size(problem, size)
        seconds, core = link_bound(problem, size, bound.seconds) if linked else (0.0, None)
        if core:
            whole = WHOLE_PARAMETERS if problem.sharding == "auto" else ""
            bound = LowerBound(seconds, core_words(problem, core), whole)
        found.append(bound)
    lowest = min(found, key=lambda bound: bound.seconds)
    return LowerBound(lowest.seconds, lowest.argument, covers + lowest.covers)


def core_words(problem: PlanningProblem, core: Core) -> str:
    """Describe the core on which the bound of links rests."""
    layers, hosts = problem.profile.layers, len(problem.cluster.hosts)
    first, last = (layers[core.layers[end]].name for end in (0, -1))
    return (
        f"{len(core.layers)} layers from '{first}' to '{last}' on one host, or their gradients or "
        f"{size_text(core.row_bytes)} a sample between {hosts} hosts"
    )


def lower_bound_s(problem: PlanningProblem) -> float:
    """The seconds of `lower_bound`."""
    return lower_bound(problem).seconds


def bound_of_size(problem: PlanningProblem, micro_batch_size: int) -> LowerBound:
    """The largest of three bounds for one micro-batch size, whatever the schedule.

    - *work*: every layer computes all samples of the batch, at most ``b`` at a time. So it takes
      at least ``batch * min(c(1), c(b) / b)`` seconds of a device of speed 1, where ``c`` is its
      forward plus backward cost. (It is affine, so the seconds per sample are extreme at the ends.)
      All devices share that work, at their full speeds.
    - *one layer*: the same for the work of one layer alone, on the ``b`` fastest devices, because a
      micro-batch of ``b`` samples has at most ``b`` slices. A mirrored pipeline holds every layer
      twice, so there it is ``2 b`` devices.
    - *one micro-batch* (whole backwards only): let each layer cost at least ``f + q * rows`` with
      f, q >= 0. A row on replica ``d``, which has ``n_d`` rows, waits for ``(f + q * n_d) / v_d``,
      and ``sum of n_d^2 / v_d >= b^2 / sum of v_d``. So the mean row passes all layers, forward and
      back, in at least ``sum of f / fastest speed + q * b / sum of speeds``.

    On hosts whose devices share cores only as many devices count as run at full speed.
    """
    costs = [layer.forward_s + layer.backward_s for layer in problem.profile.layers]
    all_speeds = sorted(chain.from_iterable(map(host_speeds, problem.cluster.hosts)), reverse=True)
    mirrored = any(FAMILIES[name].placement == "mirrored" for name in problem.schedules)
    holders = (1 + mirrored) * micro_batch_size
    speeds = all_speeds[:holders]
    work_s = [problem.global_batch * least_per_sample(cost, micro_batch_size) for cost in costs]
    most = max(range(len(work_s)), key=work_s.__getitem__)
    bounds = [
        LowerBound(sum(work_s) / sum(all_speeds), f"all work over all {len(all_speeds)} devices"),
        LowerBound(
            work_s[most] / sum(speeds),
            f"layer {most} '{problem.profile.layers[most].name}' alone, on {len(speeds)} devices",
        ),
    ]
    if has_whole_backwards(problem):
        floors = [floor_of(cost, micro_batch_size) for cost in costs]
        fixed_s = sum(floor.fixed for floor in floors) / speeds[0]
        by_rows_s = sum(floor.per_sample for floor in floors) * micro_batch_size / sum(speeds)
        through = f"one micro-batch of {micro_batch_size} samples through all layers and back"
        bounds.append(LowerBound(fixed_s + by_rows_s, through))
    return max(bounds, key=lambda bound: bound.seconds)


def has_whole_backwards(problem: PlanningProblem) -> bool:
    """Return whether all schedules allowed have whole backwards and one stage a device."""
    return all(FAMILIES[name].is_planned for name in problem.schedules)


def gap(iteration_s: float, bound_s: float) -> float:
    """By which share a plan is slower than a bound: 0.25 for a quarter more.

    >>> gap(1.25, 1.0)
    0.25
    """
    return iteration_s / bound_s - 1 if bound_s > 0 else inf


@dataclass(frozen=True)
class Prepared:
    """Data that the bounds of all plans of a problem share.

    ``near``: for each cut the tensors made right before it, each with its nearest reader.
    ``receive_rates``: the best link into each device. ``any_streams``: some device sends a message
    beside the pass that makes it.
    """

    layers: Layers
    near: tuple[tuple[Edge, ...], ...]
    receive_rates: tuple[float, ...]
    any_streams: bool


@remembered
def prepare(problem: PlanningProblem) -> Prepared:
    """Compute what the bounds of all plans of ``problem`` share."""
    rates = link_matrices(problem.cluster).bytes_per_s
    np.fill_diagonal(rates, 0.0)
    return Prepared(
        layers=layers_in_core(problem.profile),
        near=near_edges(problem.profile),
        receive_rates=tuple(rates.max(axis=0).tolist()),
        any_streams=any(device.concurrent_passes for device in problem.cluster.devices),
    )


def near_edges(profile: ModelProfile) -> tuple[tuple[Edge, ...], ...]:
    """The tensors of the layer right before each cut, with their nearest readers."""
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
    tensors made right before the cut. Where devices stream, a message counts for what is left of it
    after the pass that makes it, and links may be busy from the start of that pass.
    """
    known = prepare(problem)
    batches = plan.micro_batches
    bound_s = first_s = after_s = sent_early_s = 0.0
    before: Stage | None = None
    for stage in plan.stages:
        fast_s, back_s, fast_tail_s, slow_whole_s, slow_tail_s = stage_times(problem, stage)
        if before is not None:
            down_s, up_s, received_s = messages(problem, before, stage)
            if known.any_streams:
                down_s, up_s = max(0.0, down_s - sent_early_s), max(0.0, up_s - back_s)
            received_s = first_s - sent_early_s + batches * received_s
            bound_s = max(bound_s, received_s + back_s + up_s + after_s)
            first_s += down_s
            after_s += up_s
        busy_s = batches * slow_whole_s
        bound_s = max(bound_s, first_s + busy_s + max(after_s, slow_tail_s))
        first_s += fast_s
        sent_early_s = fast_s if known.any_streams else 0.0
        after_s = max(fast_tail_s, back_s + after_s)
        before = stage
    return bound_s


def stage_times(problem: PlanningProblem, stage: Stage) -> tuple[float, ...]:
    """The times of a stage for `plan_bound_s`.

    Over all replicas, the least forward, the least backward, and the least time from the start of
    the last backward to the end. Of the slowest replica, forward and backward together, and the
    time from its last backward to the end of its gradients and step.
    """
    sharding = problem.sharding_of(stage)
    key = (stage.layers.start, stage.layers.stop, stage.devices, stage.slices, sharding)

    def computed() -> tuple[float, ...]:
        layers, run = prepare(problem).layers, (stage.layers.start, stage.layers.stop)
        speeds = (problem.cluster.devices[device].speed for device in stage.devices)
        # Forward, backward, and from the start of the last backward on, of replicas that differ.
        times: list[tuple[float, float, float]] = []
        for rows, speed in set(zip(stage.slices, speeds, strict=True)):
            back_s = layers.backward_s(run, rows) / speed
            tail_s = gradient_tail_s(problem, stage, rows, speed, back_s)
            times.append((layers.forward_s(run, rows) / speed, back_s, tail_s))
        forward_s, back_s, tail_s = max(times, key=lambda own: own[0] + own[1])
        return (*map(min, zip(*times, strict=True)), forward_s + back_s, tail_s - back_s)

    return recalled(problem, stage_times, key, computed)


def messages(problem: PlanningProblem, before: Stage, stage: Stage) -> tuple[float, ...]:
    """Least seconds of the messages between two stages: down, up, and received by some replica.

    Only tensors of the layer right before the cut count, which are surely for this stage.
    """
    rows = sum(stage.slices)
    key = (stage.layers.start, stage.layers.stop, before.devices, stage.devices, rows)

    def computed() -> tuple[float, ...]:
        known = prepare(problem)
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

    return recalled(problem, messages, key, computed)


def gradient_tail_s(
    problem: PlanningProblem, stage: Stage, rows: int, speed: float, back_s: float
) -> float:
    """Least seconds from the start of the last backward, of ``back_s``, to the end of the step.

    Gradients come from the last layer on; nothing is reduced before `BUCKET_BYTES` are there. Where
    devices divide parameters, gradients are summed in the backwards.
    """
    layers, run = prepare(problem).layers, (stage.layers.start, stage.layers.stop)
    size_bytes = layers.own_bytes(run)
    fastest = max(problem.cluster.devices[device].speed for device in stage.devices)
    step_s = size_bytes * problem.profile.step_s_per_byte / fastest
    if problem.sharding_of(stage) == "parameters":
        return back_s + step_s / stage.replicas
    if stage.replicas == 1 or size_bytes <= 0:
        return back_s + step_s
    ready_s = layers.backward_s((layers.first_bucket(run), stage.layers.stop), rows)
    reduce_s = size_bytes / BUCKET_BYTES * bucket_s(problem, stage)
    return max(back_s, ready_s / speed + reduce_s) + step_s


def bucket_s(problem: PlanningProblem, stage: Stage) -> float:
    """Seconds to reduce one full bucket; smaller ones take more for each byte."""

    def computed() -> float:
        costs = all_reduce_costs(problem.cluster, stage.devices)
        return min(cost.of(BUCKET_BYTES) for cost in costs)

    return recalled(problem, bucket_s, stage.devices, computed)
