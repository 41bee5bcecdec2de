"""Find a plan for the ranks of a script, as `Pipeline` does where none is given.

    every rank    measures the links between ranks, then its layers while the others do
    rank 0        plans, and prints the plan beside the best one of the other kind
    every rank    gets the plan

Measurements and plans are cached in a file, by all that they depend on: a second start reads it.
"""

import hashlib
import json
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.capture.contract import Batch
from penstock.capture.forward.materialise import named_tensors
from penstock.capture.layer_graph import LayerGraph
from penstock.capture.record.stand_ins import with_values
from penstock.cluster.cluster import Cluster
from penstock.cluster.toml_file import cluster_from_toml, cluster_text
from penstock.device import check_free_memory, device_kind, is_gpu
from penstock.errors import BadInput, Infeasible
from penstock.files import parse_json, read_text, write_text
from penstock.machine import core_seconds, usable_cores
from penstock.measure.layer_times import measure_profile, measure_step_s_per_byte
from penstock.measure.links import (
    Carrier,
    MeasuredLink,
    Member,
    cluster_alone,
    cluster_of,
    measure_pairs,
)
from penstock.measure.machine_load import other_load, slowed
from penstock.measure.same_work import parameter_bytes_of
from penstock.measure.workers import profile_and_speeds
from penstock.plan.json_file import plan_from_json, plan_to_json
from penstock.plan.plan import Plan, parallel_words, plan_words
from penstock.plan.problem import (
    PREDICTION_ERROR,
    SHARED_CORES_ERROR,
    PlanningProblem,
    micro_batch_sizes_of,
)
from penstock.planners.find_plan import find_plan
from penstock.planners.problem import planning_problem
from penstock.profile.json_file import profile_from_json, profile_to_json
from penstock.profile.model_profile import ModelProfile
from penstock.runtime.options import MakeOptimizer, Options
from penstock.runtime.processes.heartbeat import doing
from penstock.runtime.processes.world import World, join_world
from penstock.runtime.tables import Constraints
from penstock.runtime.update.host_state import HostState
from penstock.runtime.update.training import made_of, state_bytes_of
from penstock.simulate.score import make_score
from penstock.text import counted, seconds_text
from penstock.torch_internals import BatchNorm
from penstock.waiting import say

REPEATS = 5

STEPPED_BYTES = 64_000_000
"""Parameters of this size do not fit in a cache, so an optimizer reads them from memory."""

Costs: TypeAlias = tuple[ModelProfile, Cluster]


@doing("finds a plan", acts=True)
def plan_here(graph: LayerGraph, batch: Batch, options: Options, constraints: Constraints) -> Plan:
    """The plan of the running ranks for such batches; all ranks must call this."""
    world = join_world(options.device, options.timeout_s)
    try:
        kept = KeptPlans(world, graph, batch, options)
        received = world.broadcast(kept.plan_text(constraints) if world.rank == 0 else "")
        if not received:
            known = None if constraints.remeasure else kept.costs
            if world.broadcast(known is None):
                known = measured_here(world, graph, batch, options)
            planned = world.all_succeed(
                lambda: kept.planned(known, constraints) if known else "", BadInput, Infeasible
            )
            received = world.broadcast(planned)
    finally:
        world.leave()
    found = json.loads(received)
    if world.rank == 0:
        say(found["words"])
    return plan_from_json(found["plan"], "rank 0's plan")


class KeptPlans:
    """Cache of measurements and plans for ``key``, in a file of this user that rank 0 alone reads.

    ``kept`` is its content: the key, profile and cluster, and plans by their constraints.
    """

    def __init__(self, world: World, graph: LayerGraph, batch: Batch, options: Options) -> None:
        self._samples, self._sizes = graph.batch_size, micro_batches_for(graph)
        state, made = state_of(options.optimizer, graph)
        self._state_bytes = state
        kinds = world.all_gather(device_kind(world.device))
        leaves = graph.batch_leaves(batch)
        loss: Any = graph.program.loss
        self.key = {
            "versions": f"penstock {version('penstock')}, torch {torch.__version__}",
            "ranks": f"{kinds} on {world.hosts}, {usable_cores()} cores",
            "optimizer": f"{made}, {state:g} bytes of state",
            "settings": f"{options.autocast}, compiled {graph.compiles}",
            "loss": getattr(loss, "__qualname__", str(loss)),
            "batch": str([(tuple(leaf.shape), leaf.dtype) for leaf in leaves]),
            "layers": str(graph.layer_names),
            "sent": text_digest(str([(spec, ends) for spec, *ends in graph.crossings])),
            "tensors": text_digest(
                str([(n, tuple(t.shape), t.dtype) for n, t in named_tensors(graph.model)])
            ),
        }
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(os.environ.get("PENSTOCK_CACHE") or Path(home, "penstock"))
        self.path = folder / f"{text_digest(str(self.key))}.json"
        self.kept: dict[str, Any] = {}
        if world.rank == 0:
            with suppress(BadInput):
                found: Any = parse_json(read_text(self.path, "kept plan"), self.path, "kept plan")
                self.kept = found if found["key"] == self.key else {}

    def plan_text(self, constraints: Constraints) -> str:
        """The plan that was found under the same constraints, as JSON; empty if there is none."""
        found = self.kept.get("plans", {}).get(constraints.text)
        return json.dumps(found) if found and not constraints.remeasure else ""

    @property
    def costs(self) -> Costs | None:
        """Profile and cluster that were measured before; None if there are none."""
        if not self.kept:
            return None
        profile = profile_from_json(self.kept["profile"], str(self.path))
        return profile, cluster_from_toml(self.kept["cluster"], self.path)

    def planned(self, costs: Costs, constraints: Constraints) -> str:
        """A new plan as JSON, with a line about it, which is kept."""
        profile, cluster = costs
        own = PlanningProblem(profile, cluster, self._samples, self._sizes, self._state_bytes)
        problem = problem_under(constraints, own)
        plan, words = found_plan(problem, constraints.planner)
        found = {"plan": plan_to_json(plan), "words": words}
        if self.kept.get("cluster") != cluster_text(cluster):
            self.kept = {"profile": profile_to_json(profile), "cluster": cluster_text(cluster)}
        self.kept["key"] = self.key
        self.kept.setdefault("plans", {})[constraints.text] = found
        with suppress(BadInput, OSError):  # a home that cannot be written to
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, json.dumps(self.kept))
        return json.dumps(found)


def text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def problem_under(constraints: Constraints, own: PlanningProblem) -> PlanningProblem:
    """The problem of a plan that is trained here, with costs, batch and optimizer of ``own``."""
    limits = asdict(constraints)
    del limits["remeasure"]
    return planning_problem(
        own.profile,
        own.cluster,
        own.global_batch,
        micro_batch_sizes=own.micro_batch_sizes,
        optimizer_bytes_per_parameter_byte=own.optimizer_bytes_per_parameter_byte,
        kept_on_device=own.kept_on_device,
        as_fast=SHARED_CORES_ERROR if own.cluster.slowing_hosts else PREDICTION_ERROR,
        **limits,
    )


def slowed_problem(problem: PlanningProblem, plan: Plan) -> PlanningProblem:
    """The problem with devices that are `slowed` as in the steps of ``plan``."""
    cluster = slowed(problem.cluster, problem.profile, plan.ranks)
    return replace(problem, cluster=cluster, memory_reserve=0.0)  # its devices have less already


def found_plan(problem: PlanningProblem, planner: str) -> tuple[Plan, str]:
    """The plan of a problem, and a line: what it takes, and the best plan of the other kind.

    Both take what they would on devices that are `slowed` as while they were measured.
    """
    score, seen = make_score(problem), dict[bool, tuple[float, Plan]]()

    def noted(plan: Plan) -> float:
        seconds = score(plan)
        is_pipeline = len(plan.device_groups) > 1
        if seconds < seen.get(is_pipeline, (inf,))[0]:
            seen[is_pipeline] = seconds, plan
        return seconds

    def seconds_words(plan: Plan) -> str:
        return seconds_text(make_score(slowed_problem(problem, plan))(plan))

    plan = find_plan(problem, planner, noted)
    words = [f"plan: {plan_words(plan, 'rank')}", f"predicted {seconds_words(plan)} a step"]
    other_s, other = seen.get(len(plan.device_groups) == 1, (inf, plan))
    if other_s < inf:
        received = ", ".join(parallel_words(other, "rank"))
        words.append(f"{received} would take {seconds_words(other)}")
    idle = len(problem.cluster.devices) - len(plan.devices)
    if idle:
        words.append(f"{counted(idle, 'rank')} would not make it faster and will wait")
    return plan, "; ".join(words)


def measured_here(world: World, graph: LayerGraph, batch: Batch, options: Options) -> Costs | None:
    """Profile and cluster of the ranks of ``world``, measured with the model itself."""

    def measured(_: Cluster) -> ModelProfile:
        device, sizes = world.device, sizes_to_measure(micro_batches_for(graph))
        return measured_profile(
            graph,
            batch,
            device,
            sizes=sizes,
            steps_s=measured_steps(graph, options.optimizer, device),
            autocast=options.autocast,
        )

    if world.rank == 0:
        say(f"measuring the layers of {graph.name} and the links between ranks, to find a plan")
    home = next((p.device for p in graph.model.parameters()), world.device)
    try:
        return costs_of_ranks(world, measured)
    finally:
        if home.type == "cpu" and world.device.type != "cpu":
            graph.own_module().to(home)


def costs_of_ranks(world: World, measured: Callable[[Cluster], ModelProfile]) -> Costs | None:
    """Profile and cluster of the ranks of ``world``; all must call this, and only rank 0 has them.

    All ranks measure at the same time, because they also train at the same time: links first, then
    layers, by ``measured``, which receives the cluster.
    """
    cluster = cluster_alone(world.device)
    if world.size > 1:
        cluster = cluster_of(*measured_pairs(world))
        world.barrier()
    start = core_seconds()
    own = world.all_succeed(lambda: measured(cluster))
    if world.device.type == "cpu":
        own = replace(own, other_load=load_here(world, start, range(world.size)))
    if world.size == 1:
        return own, cluster
    received = world.all_gather(json.dumps(profile_to_json(own)))
    if world.rank:
        return None
    profiles = [profile_from_json(json.loads(found), "a rank's profile") for found in received]
    return profile_and_speeds(profiles, cluster)


def load_here(world: World, start: tuple[float, float], ranks: Iterable[int]) -> float:
    """The share by which work of this rank took longer since ``start``, for other programs.

    Since then ``ranks`` have computed. All must call this: one rank may have a quota of its own.
    """
    end, own_host = core_seconds(), world.hosts[world.rank]
    granted = zip(world.hosts, world.all_gather(usable_cores()), strict=True)
    cores = max(own for host, own in granted if host == own_host)
    return other_load(start, end, sum(world.hosts[rank] == own_host for rank in ranks), cores)


def measured_pairs(world: World) -> tuple[list[Member], dict[tuple[int, int], MeasuredLink]]:
    """The ranks of a world and the links between them, by what will carry their messages.

    Messages of ranks that share a GPU go through the host's memory, and others of GPUs by NCCL.
    """
    if world.backend == "gloo":
        return measure_pairs(world.device, Carrier(torch.device("cpu")))
    group = world.new_group(range(world.size))
    assert group is not None
    found = measure_pairs(world.device, Carrier(world.device, group))
    world.abandon(group)
    return found


def measured_profile(
    graph: LayerGraph,
    batch: Batch,
    device: torch.device,
    *,
    sizes: Sequence[int],
    steps_s: Sequence[float],
    autocast: torch.dtype | None,
) -> ModelProfile:
    """The profile that this rank measures, alone or beside others, for these micro-batches.

    ``steps_s`` are the results of `measured_steps`.
    """
    found = measure_profile(
        graph,
        batch,
        batch_sizes=sizes,
        repeats=REPEATS,
        device=device,
        autocast=autocast,
        step_s_per_byte=steps_s[0],
    )
    tokens = tokens_per_sample(graph.batch_leaves(batch))
    return replace(found, host_step_s_per_byte=steps_s[1], tokens_per_sample=tokens)


def measured_steps(
    graph: LayerGraph, optimizer: MakeOptimizer | None, device: torch.device
) -> tuple[float, float]:
    """Seconds of an optimizer's step for each byte of parameters: on a device, in host memory.

    The second is 0 on a CPU, where both are the same.
    """
    parameters = parameter_bytes_of(graph)[0]
    least = 2 * max(own for own, _ in parameters)
    check_free_memory(device, least, "to measure the model's largest layer")
    if optimizer is None:
        return 0.0, 0.0
    module = graph.stage(stepped_layers(parameters)).module
    names = {parameter: name for name, parameter in graph.program.named_parameters()}

    def make(those: Sequence[nn.Parameter]) -> Optimizer:
        return made_of(optimizer, [(names.get(parameter, ""), parameter) for parameter in those])

    with with_values([module], device):
        timed = partial(measure_step_s_per_byte, module, make)
        on_device = timed()
        if not is_gpu(device):
            return on_device, 0.0
        trained = [p for p in module.parameters() if p.requires_grad]
        return on_device, timed(in_place=HostState(trained).in_place)


def stepped_layers(parameters: Sequence[tuple[int, int]]) -> range:
    """The run of layers with the fewest bytes that exceeds all caches; all layers if none does.

    Some layers are stepped, not the whole model: a step takes six times the bytes of parameters.
    """
    ends = list(accumulate((own for own, _ in parameters), initial=0))
    runs = [range(lo, bisect_left(ends, ends[lo] + STEPPED_BYTES)) for lo in range(len(parameters))]
    large = [run for run in runs if run.stop < len(ends)]
    every = range(len(parameters))
    return min(large, key=lambda run: ends[run.stop] - ends[run.start], default=every)


def micro_batches_for(graph: LayerGraph) -> tuple[int, ...]:
    """Sizes of micro-batches to choose among: batch norm needs two samples."""
    sizes = micro_batch_sizes_of(graph.batch_size)
    if any(isinstance(module, BatchNorm) for module in graph.model.modules()):
        return tuple(size for size in sizes if size > 1) or sizes
    return sizes


def sizes_to_measure(choices: Sequence[int]) -> tuple[int, ...]:
    """Batch sizes from half of the smallest micro-batch to the largest of these micro-batches.

    2 is not halved, since it may be the least that there can be.
    """
    largest, smallest = max(choices), max(1, min(choices) // 2, min(2, *choices))
    return tuple(sorted({smallest, max(1, largest // 4), max(1, largest // 2), largest}))


def tokens_per_sample(leaves: Sequence[torch.Tensor]) -> float:
    """The whole numbers that a sample has in the first input of several; 0 where none has any.

    The first dimension of the first input is the samples'. Images have no whole numbers, and
    classes are one for each sample.
    """
    for leaf in leaves:
        whole = not leaf.dtype.is_floating_point and leaf.dtype != torch.bool
        if whole and leaf.dim() == 2 and len(leaf) == len(leaves[0]):
            return float(leaf.shape[1])
    return 0.0


def state_of(make: MakeOptimizer | None, graph: LayerGraph) -> tuple[float, str]:
    """The bytes that an optimizer keeps for each byte of parameters, and its kind in words."""
    if make is None:
        return 0.0, "none"
    return state_bytes_of(make, graph.program.named_parameters())
