"""The whole model on every device, each computing its share of the rows."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from operator import itemgetter

from penstock.costs.lower_bound import plan_bound_s
from penstock.costs.stage_costs import estimate_s, leanest_schedule, rows_by_speed
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem, Score
from penstock.planners.choice import Candidate, best_candidate


def data_parallel(problem: PlanningProblem, score: Score) -> Plan:
    """One stage on the best number of devices, rows in proportion to their speeds.

    Micro-batches accumulate their gradients, which are reduced once, at the end. The devices are
    the fastest ones, in the cluster's order. They are fewer than all where the all-reduce costs
    more than the last devices gain, or where a micro-batch has fewer rows than there are devices.
    """
    counts = device_counts(len(problem.cluster.devices))
    candidates = [
        candidate for count in counts for candidate in one_stage_candidates(problem, count)
    ]
    return best_candidate(problem, candidates, score, planner="data-parallel")


def device_counts(most: int) -> tuple[int, ...]:
    """Numbers of devices to try: every number of few devices; of many, in steps of a sixteenth.

    >>> device_counts(4), len(device_counts(1024))
    ((1, 2, 3, 4), 89)
    """
    counts = [most]
    while counts[-1] > 1:
        counts.append(counts[-1] - max(1, counts[-1] // 16))
    return tuple(reversed(counts))


def one_stage_candidates(problem: PlanningProblem, count: int) -> Iterator[Candidate]:
    """One stage on the ``count`` fastest devices, by micro-batch size and recompute.

    The schedule is the leanest allowed: more micro-batches in flight would not help one stage.
    """
    speeds = [device.speed for device in problem.cluster.devices]
    fastest = sorted(range(len(speeds)), key=lambda device: (-speeds[device], device))
    devices = tuple(sorted(fastest[:count]))
    for micro_batch_size in problem.micro_batch_sizes:
        if micro_batch_size < count:
            continue
        slices = rows_by_speed(problem.cluster, devices, micro_batch_size)
        for recompute in problem.recompute_choices:
            layers = range(len(problem.profile.layers))
            plan = Plan(
                stages=(Stage(layers, devices, slices, recompute),),
                micro_batches=problem.global_batch // micro_batch_size,
                micro_batch_size=micro_batch_size,
                schedule=leanest_schedule(problem),
            )
            yield Candidate(plan, estimate_s(problem, plan))


def dividing_plan(problem: PlanningProblem, score: Score, sharding: str) -> Plan | None:
    """The fastest plan of one stage on all devices, which divide ``sharding``, if any fits.

    "optimizer" is ZeRO-1, "parameters" FSDP.
    """
    plain = replace(problem, recompute="off", blocks="no")
    plans = [
        replace(one.plan, stages=(replace(stage, recompute=w, by_block=b, sharding=sharding),))
        for one in one_stage_candidates(plain, len(problem.cluster.devices))
        for stage in one.plan.stages
        for w, b in problem.recompute_ways
    ]
    best_s, best = inf, None
    for bound_s, plan in sorted(((plan_bound_s(problem, p), p) for p in plans), key=itemgetter(0)):
        if bound_s >= best_s:
            break
        seconds = score(plan)
        if seconds < best_s:
            best_s, best = seconds, plan
    return best


def single_device(problem: PlanningProblem, score: Score) -> Plan:
    """One stage on the fastest device, by the best micro-batch size."""
    candidates = one_stage_candidates(problem, 1)
    return best_candidate(problem, candidates, score, planner="single-device")
