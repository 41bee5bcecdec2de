"""How much longer plans take where messages go in order, as over NCCL, and whether others are best.

    python benchmarks/simulator/message_order.py

First the plans of the rehearsals (`benchmarks/rehearsal`), each played both ways. Then models that
are planned by `search` both ways: what the plan for messages as they are ready loses where they go
in order, against the plan that knows it.
"""

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "rehearsal"))

import rehearse  # noqa: E402

from penstock import plan_pipeline  # noqa: E402
from penstock.cluster.cluster import Cluster  # noqa: E402
from penstock.cluster.toml_file import find_cluster  # noqa: E402
from penstock.plan.plan import Plan  # noqa: E402
from penstock.profile.find import find_profile  # noqa: E402
from penstock.profile.model_profile import ModelProfile  # noqa: E402
from penstock.simulate.simulation import simulate_plan  # noqa: E402

MOST_RANKS = 16

BATCHES = {"bert-48": 64, "gnmt-16": 1024, "vgg-19": 2048, "xlnet-36": 128}
CLUSTERS = ("dapple-a", "dapple-b", "dapple-c", "mixed-gpus", "slow-host", "h100-pod-16")


def in_order(cluster: Cluster) -> Cluster:
    """The cluster with one communicator of NCCL for all messages."""
    return replace(cluster, messages_in_order=True)


def seconds(plan: Plan, profile: ModelProfile, cluster: Cluster) -> float:
    """The predicted iteration."""
    return simulate_plan(plan, profile, cluster, with_timeline=False).iteration_s


def played() -> list[float]:
    """By what share each plan of a rehearsal takes longer."""
    longer: list[float] = []
    for case in rehearse.cases():
        if case.ranks > MOST_RANKS:
            continue
        profile, cluster = find_profile(case.model), find_cluster(case.cluster)
        plan = rehearse.plan_of(case, profile)
        usual_s = seconds(plan, profile, cluster)
        longer.append(seconds(plan, profile, in_order(cluster)) / usual_s - 1)
        where = f"{case.cluster}, {case.ranks} ranks, {case.replicas} a stage"
        print(f"{case.model} on {where}, {case.schedule}: {longer[-1]:+.1%}")
    return longer


def planned_anew() -> list[float]:
    """By what share the plan for messages as they are ready is slower than the one in order."""
    lost: list[float] = []
    for (model, batch), name in product(BATCHES.items(), CLUSTERS):
        profile, cluster = find_profile(model), find_cluster(name)
        usual = plan_pipeline(profile, cluster, batch)
        found = plan_pipeline(profile, in_order(cluster), batch)
        usual_s, in_order_s = (seconds(one, profile, in_order(cluster)) for one in (usual, found))
        lost.append(usual_s / in_order_s - 1)
        longer = usual_s / seconds(usual, profile, cluster) - 1
        stages = [f"{len(plan.stages)} stages by {plan.schedule}" for plan in (usual, found)]
        print(f"{model} on {name}: {' -> '.join(stages)}, {longer:+.1%}, lost {lost[-1]:+.1%}")
    return lost


def main() -> None:
    """Print both tables and their summaries."""
    for what, shares in (("played", played()), ("planned anew", planned_anew())):
        moved = sum(abs(share) > 1e-9 for share in shares)
        print(
            f"{what}: {moved} of {len(shares)} differ, median {median(shares):+.1%}, from "
            f"{min(shares):+.1%} to {max(shares):+.1%}"
        )


if __name__ == "__main__":
    main()
