"""What a search compiles: each loop once, since a loop is compiled anew for other types."""

import subprocess
import sys

PLAN = """
from penstock.cluster.toml_file import find_cluster
from penstock.kernels import kernels
from penstock.planning.answers import find_plan
from penstock.planning.planning_problem import planning_problem
from penstock.profile.find import find_profile
from penstock.simulate.score import make_score

problem = planning_problem(
    find_profile("bert-48"), find_cluster("dapple-a"), 32, planner="search", micro_batch_size=1
)
find_plan(problem, "search", make_score(problem))
for function, kernel in kernels.items():
    print(function.__qualname__, len(kernel.overloads))
"""


def test_a_search_asks_for_every_loop_with_one_combination_of_types():
    ended = subprocess.run([sys.executable, "-c", PLAN], capture_output=True, text=True, check=True)
    times = dict(line.split() for line in ended.stdout.splitlines())
    assert "play_wishes" in times
    assert {name: count for name, count in times.items() if count != "1"} == {}
