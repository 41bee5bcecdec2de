"""Times that no plan can beat."""

from math import inf

from penstock.cluster.cluster import Cluster
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import Affine, ModelProfile

__all__ = ["gap", "lower_bound_s", "plan_bound_s"]


def lower_bound_s(problem: PlanningProblem) -> float:
    """Seconds that no plan of ``problem`` can beat, whatever its stages, replicas and schedule.

    For each micro-batch size ``b`` the largest of three, then the least over the sizes:

    - *work*: every layer computes all samples of the batch, at most ``b`` at a time, so it takes
      at least ``batch * min(c(1), c(b) / b)`` seconds of a device of speed 1, where ``c`` is its
      forward plus backward cost (affine: the seconds per sample are extreme at the ends). All
      that work is shared by all devices, at their full speeds.
    - *one layer*: the same for the work of one layer alone, on the ``b`` fastest devices: a
      micro-batch of ``b`` samples has at most ``b`` slices.
    - *one micro-batch*: with each layer's cost at least ``f + q * rows``, f, q >= 0, the mean over
      the rows of the time in which a row passes all layers, forward and back, is at least
      ``sum of f / fastest speed + q * b / sum of speeds``: a row on replica ``d`` with ``n_d`` of
      the rows waits for ``(f + q * n_d) / v_d``, and ``sum of n_d^2 / v_d >= b^2 / sum of v_d``.

    Messages, all-reduces and waiting only add to it. On hosts whose devices share cores only as
    many devices count as run at full speed.
    """
    return min(bound_of_size(problem, size) for size in problem.micro_batch_sizes)


def bound_of_size(problem: PlanningProblem, micro_batch_size: int) -> float:
    """The bound for one micro-batch size."""
    costs = layer_costs(problem.profile)
    all_speeds = full_speeds(problem.cluster)
    speeds = all_speeds[:micro_batch_size]
    work_s = [problem.global_batch * least_per_sample(cost, micro_batch_size) for cost in costs]
    floors = [floor_of(cost, micro_batch_size) for cost in costs]
    fixed_s = sum(floor.fixed for floor in floors) / speeds[0]
    by_rows_s = sum(floor.per_sample for floor in floors) * micro_batch_size / sum(speeds)
    return max(sum(work_s) / sum(all_speeds), max(work_s) / sum(speeds), fixed_s + by_rows_s)


def layer_costs(profile: ModelProfile) -> list[Affine]:
    """Forward plus backward of every layer."""
    return [layer.forward_s + layer.backward_s for layer in profile.layers]


def least_per_sample(cost: Affine, most_samples: int) -> float:
    """The fewest seconds a sample can take in slices of 1 to ``most_samples``."""
    return max(0.0, min(cost.at(1), cost.at(most_samples) / most_samples))


def floor_of(cost: Affine, most_samples: int) -> Affine:
    """A cost with no negative term that is not above ``cost`` for 1 to ``most_samples`` samples.

    Fitted costs may have one: ``-1 + 3 n`` is at least ``2 n``, and ``9 - n`` at least its last.
    """
    if cost.fixed < 0:
        return Affine(0.0, max(0.0, cost.at(1)))
    if cost.per_sample < 0:
        return Affine(max(0.0, cost.at(most_samples)), 0.0)
    return cost


def full_speeds(cluster: Cluster) -> list[float]:
    """Speeds of the devices that can compute at full speed at once, fastest first."""
    speeds: list[float] = []
    for host in cluster.hosts:
        of_host = sorted((device.speed for device in host.devices), reverse=True)
        speeds += of_host[: host.full_speed_devices or len(of_host)]
    return sorted(speeds, reverse=True)


def plan_bound_s(problem: PlanningProblem, plan: Plan) -> float:
    """Seconds that no schedule of ``plan`` with whole backwards can beat.

        max over stages n of   sum over k < n of (F_k + B_k)  +  M * P_n

    A stage is busy for ``M * P_n`` on its slowest replica, after the first micro-batch came down
    and before the last went back up; above it counts the fastest replica.
    """
    passed_s = bound_s = 0.0
    for stage in plan.stages:
        seconds = replica_seconds(problem, stage)
        bound_s = max(bound_s, passed_s + plan.micro_batches * max(seconds))
        passed_s += min(seconds)
    return bound_s


def replica_seconds(problem: PlanningProblem, stage: Stage) -> list[float]:
    """Forward plus backward of one micro-batch on each replica of a stage."""
    profile, devices = problem.profile, problem.cluster.devices
    return [
        (profile.forward_s(stage.layers, rows) + profile.backward_s(stage.layers, rows))
        / devices[device].speed
        for device, rows in zip(stage.devices, stage.slices, strict=True)
    ]


def gap(iteration_s: float, bound_s: float) -> float:
    """By how much a plan is slower than a bound: 0.25 for a quarter more.

    >>> gap(1.25, 1.0)
    0.25
    """
    return iteration_s / bound_s - 1 if bound_s > 0 else inf
