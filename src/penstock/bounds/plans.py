"""Real plans after the relaxed one that the bound is about: good plans to start a search from."""

from penstock.bounds.lower_bound import proof_of
from penstock.bounds.relaxation import RelaxedStage
from penstock.plan.cost import rows_by_speed
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem

__all__ = ["relaxed_plans"]


def relaxed_plans(problem: PlanningProblem) -> tuple[Plan, ...]:
    """The bound's relaxed plan on real devices, once for every allowed schedule.

    It has the cuts, replicas and micro-batch size with which no plan of its shape could be faster
    than the bound; devices of the kinds it asks for are taken in their order. None where the bound
    has no relaxed plan, or the devices run out. Whether they fit in memory is for the score to say.
    """
    relaxed = proof_of(problem).plan
    if relaxed is None:
        return ()
    free = list(range(len(problem.cluster.devices)))
    stages: list[Stage] = []
    for stage in relaxed.stages:
        devices = take(problem, free, stage)
        if not devices:
            return ()
        rows = rows_by_speed(problem.cluster, devices, relaxed.micro_batch_size)
        stages.append(Stage(stage.layers, devices, rows, problem.recompute == "on"))
    batches = problem.global_batch // relaxed.micro_batch_size
    return tuple(
        Plan(tuple(stages), batches, relaxed.micro_batch_size, schedule)
        for schedule in problem.schedules
    )


def take(problem: PlanningProblem, free: list[int], stage: RelaxedStage) -> tuple[int, ...]:
    """The next free devices of the kinds that a relaxed stage stands on, out of ``free``."""
    devices = problem.cluster.devices
    kinds = sorted({(device.speed, device.memory_bytes) for device in devices})
    wanted = stage.option.taken
    taken: list[int] = []
    if len(wanted) != len(kinds):
        taken += free[: stage.option.replicas] if stage.option.replicas <= len(free) else []
    else:
        for kind, count in zip(kinds, wanted, strict=True):
            same = [d for d in free if (devices[d].speed, devices[d].memory_bytes) == kind]
            if count > len(same):
                return ()
            taken += same[:count]
    for device in taken:
        free.remove(device)
    return tuple(sorted(taken))
