"""The architect's check: what CONTRIBUTING tells how to add is a file of its own and one entry."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import penstock

SCHEDULE = '''
from penstock.schedule.family import Family
from penstock.schedule.schedule import Schedule, schedule_from_actions
from penstock.schedule.action import Action
from penstock.schedule.shape import PipelineShape


def one_by_one(shape: PipelineShape) -> Schedule:
    """A micro-batch goes all the way before the next one starts, to and fro over the groups."""
    return schedule_from_actions(
        [
            Action(kind, stage, m)
            for m in range(shape.micro_batches)
            for kind, stages in (("F", (group, 2 * shape.groups - 1 - group)), ("B", None))
            for stage in (stages or (2 * shape.groups - 1 - group, group))
        ]
        for group in range(shape.groups)
    )


ONE_BY_ONE = Family(one_by_one, "folded", rounds=2)
'''

PLANNER = '''
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem, Score


def halves(problem: PlanningProblem, score: Score) -> Plan:
    """Two stages of half the layers each, on the first two devices."""
    layers, size = len(problem.profile.layers), min(problem.micro_batch_sizes)
    runs = range(0, layers // 2), range(layers // 2, layers)
    stages = tuple(Stage(run, (device,), (size,)) for device, run in enumerate(runs))
    return Plan(stages, problem.global_batch // size, size, problem.schedules[0])
'''

BRIDGE = '''
from penstock.integrations.bridges.modules import NamedPlan

TARGET = "Slices"


def slices(given: NamedPlan) -> tuple[str, list[str]]:
    """The modules of each stage, a line each."""
    return "\\n".join(" ".join(names) for names in given.names), []
'''

CLUSTER = """
name = "cards"

[[hosts]]
name = "host"
link_bandwidth = "300 GB/s"
port_bandwidth = "50 GB/s"

[[hosts.devices]]
kind = "Card-192GB"
memory = "192 GB"
count = 8
"""

PROGRAM = """
from dataclasses import replace
from pathlib import Path

from penstock.integrations.bridges.formats import export_layout
from penstock.measure.hardware import hardware_named
from penstock.cluster.toml_file import find_cluster
from penstock.planners.problem import planning_problem
from penstock.profile.find import find_profile
from penstock.schedule.registry import FAMILIES
from penstock.planners.search.search import PLANNERS, rescheduled
from penstock.simulate.simulation import simulate_plan

profile, cluster = find_profile("vgg-19"), find_cluster("dapple-a")
problem = planning_problem(profile, cluster, 8, micro_batch_size=4)
plan = PLANNERS["halves"](problem, lambda plan: 1.0)
folded = rescheduled(problem, plan, "one-by-one", lambda plan: 1.0)
assert len(folded.stages) == 4 and folded.placement == (0, 1, 1, 0), folded
busy_s = simulate_plan(folded, profile, cluster).iteration_s
assert 0 < simulate_plan(plan, profile, cluster).iteration_s < busy_s < 60
assert find_cluster("cards").devices[7].kind == hardware_named("card").name
layers = tuple(replace(layer, name=f"h.{i}") for i, layer in enumerate(profile.layers))
named = replace(profile, layers=layers)
text = export_layout("slices", plan, named, Path("layout"), {}).text
assert [line.split()[0] for line in text.splitlines()] == ["h.0", f"h.{len(layers) // 2}"], text
print(*list(PLANNERS)[-1:], *list(FAMILIES)[-1:])
"""


def test_what_newcomers_add_is_a_file_and_a_line_each(tmp_path: Path) -> None:
    package = tmp_path / "penstock"
    shutil.copytree(
        Path(penstock.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__")
    )
    (package / "schedule" / "families" / "one_by_one.py").write_text(SCHEDULE)
    add_line(
        package / "schedule" / "registry.py",
        before="    }\n)",
        line='        "one-by-one": "families.one_by_one.ONE_BY_ONE",\n',
    )
    (package / "planners" / "halves.py").write_text(PLANNER)
    registry = package / "planners" / "registry.py"
    add_line(registry, before='}\n"""All but', line='    "halves": halves,\n')
    first = "from penstock.planners.bapipe.bapipe import"
    add_line(registry, before=first, line="from penstock.planners.halves import halves\n")
    (package / "integrations" / "bridges" / "slices.py").write_text(BRIDGE)
    formats = package / "integrations" / "bridges" / "formats.py"
    add_line(
        formats,
        before='}\n"""The title',
        line='    "slices": (slices.TARGET, slices.slices),\n',
    )
    first = "from penstock.integrations.bridges.layout import"
    add_line(formats, before=first, line="from penstock.integrations.bridges import slices\n")
    (package / "cluster" / "presets" / "cards.toml").write_text(CLUSTER)
    add_line(
        package / "measure" / "hardware.py",
        before='    Hardware("cpu"',
        line='    gpu("Card-192GB", (9e13, 12e14, 3e12), 192e9, H100_SHARES, "made up"),\n',
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["halves", "one-by-one"], done.stderr


def add_line(path: Path, before: str, line: str) -> None:
    """Put a line into a file where a dictionary ends."""
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, line + before))
