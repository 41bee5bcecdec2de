"""Runs that nothing happens to, with which the resumed ones are compared."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from faults import Transport
from runs import HERE, Start, begin, place_in
from verdict import tensors_of

JOB = HERE / "tiny.toml"
LAYERS = 5
COSTS = ("profile.json", "cluster.toml")
LIMIT_S = 400.0


@dataclass(frozen=True)
class Unbroken:
    """A run that nothing happened to: its plan, its costs and its last tensors."""

    plan: Path
    costs: Path
    tensors: Mapping[str, bytes]


def plan_for(ranks: int, folder: Path) -> Path:
    """A plan of this many ranks: stages, and from three ranks on replicas."""
    from penstock.plan.json_file import write_plan
    from penstock.plan.plan import Plan, Stage

    front, middle = range(0, 2), range(2, 3)
    stages = {
        2: (Stage(front, (0,), (4,)), Stage(range(2, LAYERS), (1,), (4,))),
        3: (Stage(front, (0, 1), (2, 2)), Stage(range(2, LAYERS), (2,), (4,))),
        4: (Stage(front, (0, 1), (3, 1)), Stage(range(2, LAYERS), (2, 3), (2, 2))),
        5: (
            Stage(front, (0, 1), (2, 2)),
            Stage(middle, (2,), (4,)),
            Stage(range(3, LAYERS), (3, 4), (1, 3)),
        ),
        6: (
            Stage(front, (0, 1, 2), (2, 1, 1)),
            Stage(middle, (3,), (4,)),
            Stage(range(3, LAYERS), (4, 5), (2, 2)),
        ),
    }
    path = folder / f"plan-{ranks}.json"
    write_plan(Plan(stages[ranks], 4, 4, "gpipe" if ranks == 4 else "1f1b"), path)
    return path


def unbroken(ranks: int, transport: Transport, folder: Path) -> Unbroken:
    """Train once without a fault, with the costs that `estimated` gives."""
    place = place_in(folder / f"unbroken-{ranks}-{transport.replace(' ', '-')}")
    plan = plan_for(ranks, folder)
    place.run.mkdir()
    estimated(ranks, place.run)
    run = begin(Start(JOB, ranks, plan, own_hosts=transport == "process groups"), place)
    run.wait(LIMIT_S)
    if run.code != 0:
        raise SystemExit(f"a run without a fault failed: {run.said()}")
    return Unbroken(plan, place.run, tensors_of(place))


def estimated(ranks: int, run: Path) -> None:
    """Write estimated costs, a thousandfold: no busy core seems slower than planned."""
    from penstock.cluster.toml_file import local_cluster, write_cluster
    from penstock.profile.json_file import write_profile
    from penstock.train.job_file import find_job
    from penstock.train.profile_job import estimate_job

    write_profile(estimate_job(find_job(JOB), ["cpu"])[0], run / COSTS[0])
    profile = json.loads((run / COSTS[0]).read_text())
    for layer in profile["layers"]:
        for figure in ("forward_s", "backward_input_s", "backward_weight_s"):
            layer[figure] = {key: 1000 * value for key, value in layer[figure].items()}
    (run / COSTS[0]).write_text(json.dumps(profile))
    cluster = local_cluster(ranks, os.cpu_count() or 1, 8e9)
    hosts = tuple(
        replace(host, link_bytes_per_s=host.link_bytes_per_s / 1000) for host in cluster.hosts
    )
    write_cluster(replace(cluster, hosts=hosts), run / COSTS[1])
