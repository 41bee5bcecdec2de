"""Every plan that DAPPLE's placements allow, one after the other: no memo, no pruning."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from penstock.costs.fit import Assignment, fitted_plan
from penstock.costs.stage_costs import depths_of, rows_by_speed, stage_seconds, transfer
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem
from penstock.planners.dapple.placement import POLICIES, Counts, servers_of

Servers = tuple[tuple[int, ...], ...]


def every_latency_s(problem: PlanningProblem) -> Iterator[float]:
    """The closed form of every plan that fits, by the first schedule that is allowed."""
    for speed in sorted({device.speed for device in problem.cluster.devices}):
        servers = servers_of(problem.cluster, speed)
        for size in problem.micro_batch_sizes:
            for assignments in every_plan(problem, servers, size, 0, (0,) * len(servers)):
                plan = fitted_plan(problem, assignments, problem.schedules[0])
                if plan is not None:
                    yield plan_latency_s(problem, plan)


def every_plan(
    problem: PlanningProblem, servers: Servers, size: int, lo: int, used: Counts
) -> Iterator[list[Assignment]]:
    """The layers from ``lo`` on, as stages on the devices that are not used."""
    layers = len(problem.profile.layers)
    free = tuple(len(server) - u for server, u in zip(servers, used, strict=True))
    last = free
    if sum(free) > size:
        placed = (policy(free, used, size) for policy in POLICIES)
        last = next(taken for taken in placed if taken is not None)
    yield [assignment(problem, servers, range(lo, layers), used, last, size)]
    for hi in range(lo + 1, layers):
        for count in range(1, min(sum(free), size + 1)):
            for taken in {policy(free, used, count) for policy in POLICIES} - {None}:
                assert taken is not None
                after = tuple(u + t for u, t in zip(used, taken, strict=True))
                first = assignment(problem, servers, range(lo, hi), used, taken, size)
                for rest in every_plan(problem, servers, size, hi, after):
                    yield [first, *rest]


def assignment(
    problem: PlanningProblem,
    servers: Servers,
    layers: range,
    used: Counts,
    taken: Counts,
    size: int,
) -> Assignment:
    """Layers on the next free devices of each server."""
    devices = tuple(
        device
        for server, u, t in zip(servers, used, taken, strict=True)
        for device in server[u : u + t]
    )
    return layers, devices, rows_by_speed(problem.cluster, devices, size)


def plan_latency_s(problem: PlanningProblem, plan: Plan) -> float:
    """`slides_s` of a plan, with the costs of `stage_costs`; memory is not looked at."""
    depths = depths_of(plan)
    forward: list[float] = []
    backward: list[float] = []
    tail: list[float] = []
    moves = [transfer(problem, *pair) for pair in pairwise(plan.stages)]
    for index, stage in enumerate(plan.stages):
        if index:
            forward.append(moves[index - 1][0])
            backward.append(moves[index - 1][1])
            tail.append(0.0)
        again = stage.recompute and depths[index] > 1
        seconds = stage_seconds(problem, stage)
        forward.append(seconds.forward_s)
        backward.append(seconds.backward_s + (seconds.forward_s if again else 0.0))
        tail.append(seconds.after_s)
    return slides_s(forward, backward, tail, plan.micro_batches)


def slides_s(
    forward: Sequence[float], backward: Sequence[float], reduce: Sequence[float], batches: int
) -> float:
    """The iteration as on the authors' slides, where the ending is counted from the first stage.

        M (F_Q + B_Q) + sum over k < Q of (F_k + B_k)
        + max over i of (AR_i - sum over s < i of B_s)
        + max(0, sum over k > Q of (F_k + B_k) - (min(S - Q, M) - 1) F_Q)

    The slides have ``(S - Q) F_Q`` in the last line. The pivot has one forward less in advance, and
    no more than there are micro-batches.
    """
    whole = [f + b for f, b in zip(forward, backward, strict=True)]
    stages = range(len(whole))
    pivot = stages[-1]
    for stage in reversed(stages[:-1]):
        if (batches - 1) * whole[stage] > (batches - 1) * whole[pivot] + sum(
            whole[stage + 1 : pivot]
        ):
            pivot = stage
    ending_s = max(reduce[stage] - sum(backward[:stage]) for stage in stages)
    waits_s = sum(whole[pivot + 1 :]) - (min(len(stages) - pivot, batches) - 1) * forward[pivot]
    return batches * whole[pivot] + sum(whole[:pivot]) + ending_s + max(0.0, waits_s)
