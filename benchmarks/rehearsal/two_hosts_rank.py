"""A rank of `two_hosts.py`, under torchrun: measures, plans, trains; rank 0 writes what it found.

    two_hosts_rank.py CLUSTER FOLDER ROUNDS

All ranks measure the layers at the same time. Rank 0 plans for the cluster. Then our plan and each
of the rival's schedules train a model of their own from the same weights on the same batches, in
turns. The ranks of a host share one core.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1] / "runtime"))

from cases import CASES, bounds_of
from contenders import Rival
from models import Model, make_model
from replicas import alternated
from torch import nn

from penstock.capture.capture import capture_model
from penstock.capture.layer_graph import LayerGraph
from penstock.cluster.cluster import Cluster
from penstock.cluster.toml_file import read_cluster, write_cluster
from penstock.files import json_text, write_text
from penstock.measure.layer_times import measure_profile, measure_step_s_per_byte
from penstock.measure.workers import median_profile
from penstock.plan.json_file import write_plan
from penstock.plan.plan import Plan
from penstock.planners.find_plan import find_plan
from penstock.planners.problem import planning_problem
from penstock.profile.json_file import write_profile
from penstock.profile.model_profile import ModelProfile
from penstock.runtime.options import Safety
from penstock.runtime.pipeline import Pipeline
from penstock.simulate.score import make_score
from penstock.timeline.json_file import write_timeline_json

RIVALS = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zb-v", "dualpipe-v")
MICRO_BATCHES = 16
PROBE_BYTES = 4 << 20
LEARNING_RATE = 1e-3


def adam(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of all contenders."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE)


class TrainedRival(Rival):
    """The rival, with an optimizer step at the end of an iteration."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        parameters = [p for module in self._modules.values() for p in module.parameters()]
        self._optimizer = adam(parameters)
        self.losses: list[float] = []

    def step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        """One iteration; the rank of the last stage keeps its loss."""
        given = batch[:1] if self._first else ()
        named: dict[str, Any] = {"target": batch[1], "losses": []} if self._last else {}
        self._schedule.step(*given, **named, return_outputs=False)
        self._optimizer.step()
        if self._last:
            self.losses.append(float(torch.stack(named["losses"]).mean()))


def main() -> None:
    """See the module."""
    cluster, folder, rounds = read_cluster(Path(sys.argv[1])), Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = make_model("gpt")
    graph = capture_model(
        nn.Sequential(*model.blocks), model.batch(1), loss=model.loss, granularity="module"
    )
    cluster, across = with_measured_links(cluster)
    profile, plan = profile_and_plan(graph, model, cluster)
    torch.manual_seed(1)
    batch = model.batch(MICRO_BATCHES)
    safety = Safety(transport="process-groups")
    pipe = Pipeline(graph, model.batch(1), plan=plan, optimizer=adam, verify="off", safety=safety)
    losses: dict[str, list[float]] = {"ours": []}
    contenders: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "ours": (lambda: None, lambda: losses["ours"].append(pipe.step(batch).loss))
    }
    for name in RIVALS:
        case = CASES[name]
        bounds = bounds_of(case, "gpt", len(model.blocks), dist.get_world_size())
        rival = TrainedRival(case, make_model("gpt"), bounds, MICRO_BATCHES)
        losses[name] = rival.losses
        contenders[name] = (rival.prepare, lambda rival=rival: rival.step(batch))
    taken = alternated(contenders, rounds)
    timeline = pipe.timeline()
    pipe.close()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, losses)
    if rank == 0:
        write_plan(plan, folder / "plan.json")
        write_profile(profile, folder / "profile.json")
        write_cluster(cluster, folder / "cluster.toml")
        write_timeline_json(timeline, folder / "trained.json")
        last = {name: next(f[name][-1] for f in every if f[name]) for name in losses}
        found = {"seconds": taken, "losses": last, "links": across}
        write_text(folder / "trained_times.json", json_text(found))
    dist.barrier()
    dist.destroy_process_group()


def with_measured_links(cluster: Cluster) -> tuple[Cluster, dict[str, Any]]:
    """The cluster with the links within a host as they are, and all that was measured."""
    measured = {
        name: figures(*probe(*ends)) for name, ends in (("within", (0, 1)), ("between", (0, 2)))
    }
    within = measured["within"]
    hosts = tuple(
        replace(
            host,
            link_bytes_per_s=within["bytes_per_s"],
            link_latency_s=within["latency_s"],
            port_latency_s=measured["between"]["latency_s"],
        )
        for host in cluster.hosts
    )
    return replace(cluster, hosts=hosts), measured


def figures(bytes_per_s: float, latency_s: float) -> dict[str, float]:
    """Names for the two figures of a link."""
    return {"bytes_per_s": bytes_per_s, "latency_s": latency_s}


def probe(one: int, other: int) -> tuple[float, float]:
    """Bytes a second and latency from one rank to another, as rank 0 saw them."""
    times: dict[int, list[float]] = {4: [], PROBE_BYTES: []}
    for size, taken in times.items():
        tensor = torch.zeros(size, dtype=torch.uint8)
        for _ in range(8):
            dist.barrier()
            start_s = perf_counter()
            if dist.get_rank() == one:
                dist.send(tensor, other)
                dist.recv(tensor[:1], other)
            elif dist.get_rank() == other:
                dist.recv(tensor, one)
                dist.send(tensor[:1], one)
            taken.append(perf_counter() - start_s)
    round_s, large_s = min(times[4]), sorted(times[PROBE_BYTES])[4]
    found: list[Any] = [(PROBE_BYTES / (large_s - round_s), round_s / 2)]
    dist.broadcast_object_list(found, src=one)
    return found[0]


def profile_and_plan(
    graph: LayerGraph, model: Model, cluster: Cluster
) -> tuple[ModelProfile, Plan]:
    """The median of the ranks' profiles, and what the search finds for it, on every rank."""
    module = graph.stage(range(len(graph.layer_names))).module
    step_s = measure_step_s_per_byte(module, adam)
    own = measure_profile(graph, model.batch(1), repeats=7, step_s_per_byte=step_s)
    profiles: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(profiles, own)
    chosen: list[Any] = [None]
    if dist.get_rank() == 0:
        profile = median_profile(profiles)
        problem = planning_problem(
            profile,
            cluster,
            model.rows * MICRO_BATCHES,
            micro_batch_size=model.rows,
            planner="search",
            recompute="off",
        )
        chosen = [(profile, find_plan(problem, "search", make_score(problem)))]
    dist.broadcast_object_list(chosen)
    return chosen[0]


if __name__ == "__main__":
    main()
    os._exit(0)
