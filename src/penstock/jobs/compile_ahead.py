"""Compiles the loops of the published planners in another process.

The first plan on a machine compiles for a quarter of a minute. The search starts with the schedule
families and asks the published planners last. So this process compiles the loops of the search and
of the simulator, and another one the loops of the planners at the same time.
"""

import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager

from penstock.cluster.presets import find_cluster
from penstock.kernels import is_on_disk
from penstock.plan.problem import PlanningProblem
from penstock.planners.dapple.dapple import dapple
from penstock.planners.dapple.kernel import explore
from penstock.planners.gpipe import gpipe
from penstock.planners.pipedream.pipedream import pipedream
from penstock.planners.spp.spp import spp
from penstock.profile.find import find_profile

__all__ = ["compile_planners", "planners_compiled_beside"]


@contextmanager
def planners_compiled_beside() -> Generator[None]:
    """Compile the planners in another process during the block, unless they are on disk.

    Machine code travels through the cache of `penstock.kernels`. Where that cannot be written, or
    the other process is too slow, this process compiles for itself.
    """
    if is_on_disk(explore):
        yield
        return
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-P", "-m", "penstock.jobs.compile_ahead"]
    process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def compile_planners() -> None:
    """Run each planner with a loop of its own on a small problem, which compiles the loop."""
    problem = PlanningProblem(find_profile("vgg-16"), find_cluster("dapple-b"), 64, (16,))
    for planner in (dapple, spp, pipedream, gpipe):
        planner(problem, lambda plan: 1.0)


if __name__ == "__main__":
    compile_planners()
