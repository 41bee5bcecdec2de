"""Trials of given plans on a worker."""

import torch

from penstock.plan.plan import Plan, Stage
from penstock.runtime.processes.world import join_world
from penstock.train.job import Job
from penstock.train.trials import seconds_of_trial


def try_in_turn(job: Job) -> tuple[list[tuple[float, str]], bool]:
    """Trials of one that fails on rank 1, one without that rank, and one on both.

    And whether random numbers go on as before.
    """
    plans = [
        Plan(
            (Stage(range(0, 2), (0,), (rows,)), Stage(range(2, 4), (1,), (rows,))),
            micro,
            rows,
            "1f1b",
        )
        for rows, micro in ((4, 4), (2, 8))
    ]
    alone = Plan((Stage(range(0, 4), (0,), (2,)),), 8, 2, "1f1b")
    world = join_world("cpu", 60)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    found = [seconds_of_trial(world, job, plan, "cpu", 60) for plan in (plans[0], alone, plans[1])]
    world.leave()
    return found, torch.equal(before, torch.get_rng_state())
