"""What another process compiles is what planning would have compiled."""

import os
import subprocess
import sys

PLAN = """
from penstock.cluster.toml_file import find_cluster
from penstock.jobs.plan_job import planners_compiled_beside
from penstock.kernels import is_on_disk, when_compiling
from penstock.planners.pipedream.pipedream import partition
from penstock.planners.registry import STARTING_PLANNERS
from penstock.planning.planning_problem import planning_problem
from penstock.profile.find import find_profile

names = []
when_compiling(names.append)
problem = planning_problem(find_profile("bert-48"), find_cluster("dapple-c"), 16, planner="dapple")
with planners_compiled_beside():
    for planner in STARTING_PLANNERS.values():
        planner(problem, lambda plan: 1.0)
print(is_on_disk(partition), names)
"""


def test_planning_compiles_nothing_that_was_compiled_ahead(tmp_path):
    def output_of(*command: str) -> str:
        environment = {**os.environ, "PENSTOCK_CACHE_DIR": str(tmp_path)}
        ended = subprocess.run(
            [sys.executable, *command], env=environment, capture_output=True, text=True, check=True
        )
        return ended.stdout.strip()

    assert output_of("-m", "penstock.jobs.plan_job") == ""
    assert output_of("-c", PLAN) == "True []"


def test_another_process_compiles_the_planners_where_they_are_not_on_disk(tmp_path):
    wait = """
import time
from penstock.jobs.plan_job import planners_compiled_beside
from penstock.kernels import is_on_disk
from penstock.planners.pipedream.pipedream import partition

assert not is_on_disk(partition)
with planners_compiled_beside():
    for _ in range(600):
        if is_on_disk(partition):
            break
        time.sleep(0.1)
print(is_on_disk(partition))
"""
    environment = {**os.environ, "PENSTOCK_CACHE_DIR": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", wait], env=environment, capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "True"
