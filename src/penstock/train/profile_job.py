"""Measure or estimate the costs of a job: layers, links between workers, and tensor groups.

The costs of a layer on a group are computed from its costs on one rank
(`penstock.planners.tensor_groups`). That leaves out what dividing costs besides the sums: every
operator on shards has an overhead, and smaller matrix products use a device less well. So a job's
workers run the whole model forward and backward on groups, as the runtime does it, and on single
ranks. For each size of groups one factor says how many times as long as computed it takes.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import cast

import torch
from torch import nn

from penstock.capture.capture import capture_model
from penstock.capture.contract import Batch
from penstock.capture.layer_graph import LayerGraph
from penstock.capture.record.stand_ins import is_on_meta
from penstock.cluster.cluster import Cluster, Host, with_devices
from penstock.cluster.toml_file import local_cluster
from penstock.device import check_gpu_is_here
from penstock.errors import SIGNALLED, BadInput, PenstockError, exit_code_of
from penstock.machine import usable_cores, usable_memory_bytes
from penstock.measure.roofline import estimate_profile
from penstock.measure.tensor_parallel import with_tensor_parallel
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.plan.row_split import split_rows
from penstock.plan_here import (
    costs_of_ranks,
    measured_profile,
    measured_steps,
    sizes_to_measure,
    tokens_per_sample,
)
from penstock.planners.tensor_groups import Groups, profile_on
from penstock.profile.model_profile import GroupFactor, ModelProfile
from penstock.runtime.options import Safety, Update
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.processes.world import World
from penstock.runtime.weights.pretrained import sources_of
from penstock.timeline.metrics import covered_s
from penstock.timeline.timeline import Timeline
from penstock.train import SEVERAL_GPUS
from penstock.train.data_lengths import data_lengths, mean_profile
from penstock.train.job import GivenGroups, Job
from penstock.train.optimizers import optimizer_factory
from penstock.train.plan_job import problem_of
from penstock.train.samples import TextData


def device_note(device: str, workers: int = 1) -> str:
    """The note about ``workers`` workers on ``device``; empty if there is none."""
    if device == "cpu":
        return ""
    check_gpu_is_here(f"--device {device}")
    return SEVERAL_GPUS if workers > 1 else ""


def built_model(job: Job) -> nn.Module:
    """The job's model with its first weights, from the job's seed."""
    torch.manual_seed(job.seed)
    try:
        model: object = job.model()
    except SystemExit as error:
        if exit_code_of(error) > SIGNALLED:
            raise
        raise BadInput(
            f"job '{job.name}': building the model ended the program (SystemExit: {error}); name "
            f"a function that returns a module"
        ) from error
    except PenstockError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise BadInput(
            f"job '{job.name}': building the model raised {type(error).__name__} in "
            f"{frame.filename}:{frame.lineno}; call it alone and correct it ({error})"
        ) from error
    if not isinstance(model, nn.Module):
        raise BadInput(
            f"job '{job.name}': building the model returned {type(model).__name__}, not a "
            f"torch.nn.Module; return the module itself"
        )
    check_vocabulary(job, model)
    return model


def check_vocabulary(job: Job, model: nn.Module) -> None:
    """Raise `BadInput` if the job's text has tokens or windows that an embedding lacks."""
    tokens = getattr(job.data, "vocabulary", 0)
    room = [part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)]
    if room and max(room) < tokens:
        raise BadInput(
            f"job '{job.name}': its text has {tokens} tokens, and the model's embedding has room "
            f"for {max(room)}; give the model a vocabulary of {tokens}, or another tokenizer"
        )
    most = getattr(getattr(model, "config", None), "max_position_embeddings", 0)
    window = getattr(job.data, "length", 0)
    if most in room and window > most:
        raise BadInput(
            f"job '{job.name}': its text has windows of {window} tokens, and its model reads "
            f"{most}; set text.length = {most} or lower"
        )


def build_and_capture(job: Job) -> LayerGraph:
    """The job's model with its first weights (from the job's seed), captured.

    A model that was built on the meta device stays there. The job's weight files are not loaded;
    only their names and shapes are compared with the model.
    """
    return captured(job, built_model(job))


def captured(job: Job, model: nn.Module) -> LayerGraph:
    """The job's model where it is, captured."""
    lengths = data_lengths(job) if job.dynamic else None
    graph = capture_model(
        model,
        lengths.typical.batch if lengths else job.example_batch(),
        loss=job.loss,
        granularity=job.granularity,
        dynamic=lengths.dynamic if lengths else None,
        rows=job.rows,
        compile=job.compile,
        tensor_parallel=job.tensor_parallel.function or job.tensor_parallel.layers,
    )
    if job.weights is not None:
        sources_of(job.weights, graph)
    return graph


def estimate_job(
    job: Job, devices: Sequence[str], dtype: torch.dtype | None = None
) -> list[ModelProfile]:
    """The profile of a job's model on each of absent ``devices``, from shapes alone.

    The model is built on the meta device, and text is not read. With ``dtype`` its parameters and
    products are of that type.
    """
    if isinstance(job.data, TextData):
        job = replace(job, data=replace(job.data, shape_only=True))
    if dtype is not None:
        job = replace(job, autocast="off")
    graph = captured_without_values(job, dtype)
    return [estimated_profile(job, graph, device) for device in devices]


def captured_without_values(job: Job, dtype: torch.dtype | None) -> LayerGraph:
    """The job's model, captured on the meta device.

    A model that needs values is built on the CPU, unless it is known not to fit into memory.
    """
    try:
        with torch.device("meta"):
            model = job.model()
    except (Exception, SystemExit):  # whatever a constructor does where there are no values
        return captured(job, in_type(built_model(job), dtype))
    if not isinstance(cast(object, model), nn.Module):
        return build_and_capture(job)  # which says so
    check_vocabulary(job, model)
    try:
        return captured(job, in_type(model, dtype))
    except Exception:
        if sum(parameter.nbytes for parameter in model.parameters()) > usable_memory_bytes():
            raise
        return captured(job, in_type(built_model(job), dtype))


def in_type(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """The model with its parameters in a type; buffers, such as angles, keep theirs."""
    for parameter in model.parameters() if dtype else ():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model


def estimates_for(
    job: Job, clusters: Sequence[Cluster]
) -> tuple[list[ModelProfile], list[Cluster]]:
    """The profile of each cluster's first device, and the cluster with speeds to match.

    The speed of another kind is the ratio of the estimated seconds of the whole model.
    """
    kinds = list(dict.fromkeys(device.kind for each in clusters for device in each.devices))
    found = dict(zip(kinds, estimate_job(job, kinds), strict=True))
    profiles = [found[each.devices[0].kind] for each in clusters]
    return profiles, [
        with_devices(each, lambda d, own=own: replace(d, speed=own.whole_s / found[d.kind].whole_s))
        for each, own in zip(clusters, profiles, strict=True)
    ]


def estimated_profile(job: Job, graph: LayerGraph, device: str) -> ModelProfile:
    """The profile of a captured model on an absent device."""

    def estimated(batch: Batch) -> ModelProfile:
        found = estimate_profile(
            graph,
            batch,
            device,
            batch_sizes=sizes_to_measure(job.micro_batch_choices()),
            autocast=job.autocast_dtype(),
            compiled=job.compile,
        )
        types = sorted({str(p.dtype).removeprefix("torch.") for p in graph.model.parameters()})
        return replace(
            found,
            tokens_per_sample=tokens_per_sample(graph.batch_leaves(batch)),
            source=f"{found.source}, parameters in {' and '.join(types)}",
        )

    return profile_by(job, graph, estimated)


def measure_job(job: Job, device: str) -> ModelProfile:
    """The profile that this process measures, alone or beside other processes."""
    graph, own = build_and_capture(job), torch.device(device)
    make = optimizer_factory(job.optimizer)
    steps_s = measured_steps(graph, make, own)

    def measured(batch: Batch) -> ModelProfile:
        with types_compared(job, graph, batch):
            return measured_profile(
                graph,
                batch,
                own,
                sizes=sizes_to_measure(job.micro_batch_choices()),
                steps_s=steps_s,
                autocast=job.autocast_dtype(),
            )

    return profile_by(job, graph, measured)


@contextmanager
def types_compared(job: Job, graph: LayerGraph, batch: Batch) -> Iterator[None]:
    """Report a batch in float64, as NumPy's numbers are, if the model fails in the block.

    Capture compares no types, and a model may convert its inputs itself.
    """
    try:
        yield
    except RuntimeError as failure:
        own = {parameter.dtype for parameter in graph.model.parameters()}
        given = {leaf.dtype for leaf in graph.batch_leaves(batch)}
        if torch.float64 in own or torch.float64 not in given:
            raise
        raise BadInput(
            f"job '{job.name}': the model fails on the first batch ({failure}), which has float64 "
            f"tensors, while its parameters are {' and '.join(sorted(map(str, own)))}; let the "
            f"data yield tensor.float()"
        ) from failure


def profile_by(
    job: Job, graph: LayerGraph, profile_of: Callable[[Batch], ModelProfile]
) -> ModelProfile:
    """The profile of the example batch, or of all lengths of the job's data.

    It has what tensor groups divide, if the job may have any.
    """

    def costed(batch: Batch) -> ModelProfile:
        found = profile_of(batch)
        return with_tensor_parallel(found, graph, batch) if job.tensor_parallel.is_wanted else found

    lengths = data_lengths(job) if job.dynamic else None
    if lengths is None:
        return costed(job.example_batch())
    every = [(group, costed(group.batch)) for group in lengths.groups]
    known = {group.lengths: profile for group, profile in every}
    longest = known.get(lengths.longest.lengths) or costed(lengths.longest.batch)
    mixed = mean_profile(
        [
            (tuple(zip(lengths.names, group.lengths, strict=True)), group.share, profile)
            for group, profile in every
        ],
        longest,
    )
    return replace(mixed, source=f"{mixed.source}; {lengths}")


def cost_job(world: World, job: Job, device: str) -> PlanningProblem | None:
    """The planning problem of the ranks of ``world``, as `costs_of_ranks`."""

    def measured(cluster: Cluster) -> ModelProfile:
        profile = measure_job(job, device)
        return with_measured_groups(profile, job, cluster, device) if world.size > 1 else profile

    costs = costs_of_ranks(world, measured)
    return problem_of(job, *costs) if costs else None


def with_measured_groups(
    profile: ModelProfile, job: Job, cluster: Cluster, device: str
) -> ModelProfile:
    """``profile`` with the measured factors of the job's tensor groups; all workers must call this.

    A factor is how many times as long as computed the model takes on groups of a size. As many as
    possible compute at the same time. Times are relative to those of single ranks by ``profile``
    and by the same kind of measurement, so what the two have in common does not count. A model on
    the meta device may not fit in memory as a whole, so its groups are not measured.
    """
    costs, sizes = profile.tensor_parallel, job.tensor_parallel.ranks
    if costs is None or not sizes:
        return profile
    graph = build_and_capture(job)
    if is_on_meta(graph.model):
        return profile
    sets = {size: found for size in sizes if (found := neighbour_groups(cluster, size))}
    problem = problem_of(job, profile, cluster)
    try:
        alone = excess_of_groups(job, graph, problem, neighbour_groups(cluster, 1), device)
        factors = tuple(
            GroupFactor(size, excess_of_groups(job, graph, problem, groups, device) / alone)
            for size, groups in sets.items()
        )
    except BadInput:
        if isinstance(job.tensor_parallel, GivenGroups):
            return profile
        raise
    return replace(profile, tensor_parallel=replace(costs, factors=factors))


def cluster_for(workers: int, measured: Host) -> Cluster:
    """A cluster of ``workers`` workers on this machine's cores, with the measured links."""
    cluster = local_cluster(workers, usable_cores(), usable_memory_bytes())
    host = replace(
        cluster.hosts[0],
        link_bytes_per_s=measured.link_bytes_per_s,
        link_latency_s=measured.link_latency_s,
    )
    return replace(cluster, hosts=(host,))


STEPS = 4
"""Steps of each measurement; the first is not counted."""


def neighbour_groups(cluster: Cluster, size: int) -> Groups:
    """All disjoint groups of ``size`` neighbours on one host."""
    hosts: list[list[int]] = [[] for _ in cluster.hosts]
    for rank, host in enumerate(cluster.host_index):
        hosts[host].append(rank)
    return tuple(
        tuple(ranks[first : first + size])
        for ranks in hosts
        for first in range(0, len(ranks) - size + 1, size)
    )


def excess_of_groups(
    job: Job, graph: LayerGraph, problem: PlanningProblem, groups: Groups, device: str
) -> float:
    """The measured time of the groups, as replicas of the model, relative to the computed one."""
    layers = len(problem.profile.layers)
    plan = one_stage_plan(job, groups, layers)
    computed = profile_on(problem.profile, problem.cluster, [groups] * layers)
    with Pipeline(
        graph,
        job.example_batch(),
        plan=plan,
        verify="off",
        device=device,
        update=Update(seed=job.seed),
        safety=Safety(compare_replicas_every=0, idle_ranks=True),
    ) as pipe:
        timelines: list[Timeline] = []
        for _ in range(STEPS):
            pipe.step(job.example_batch())  # without an optimizer it changes no weight
            timelines.append(pipe.timeline())
    (stage,) = plan.stages
    every = range(layers)
    factors: list[float] = []
    for replica, rows in zip(stage.devices, stage.slices, strict=True):
        expected_s = computed.work_s(every, rows)
        for rank in plan.ranks_of(replica):
            seconds = (
                covered_s(e for e in timeline.events if e.device == rank and e.kind in "FB")
                for timeline in timelines[1:]
            )
            factors.append(median(seconds) / (plan.micro_batches * expected_s))
    return median(factors)


def one_stage_plan(job: Job, groups: Groups, layers: int) -> Plan:
    """The whole model on each of ``groups``, with a usual micro-batch of the job."""
    choices = sorted(job.micro_batch_choices())
    enough = [size for size in choices if size >= len(groups)] or choices[-1:]
    size = enough[len(enough) // 2]
    used = groups[:size]
    stage = Stage(range(layers), tuple(range(len(used))), split_rows(size, (1.0,) * len(used)))
    return Plan((stage,), job.batch_size // size, size, "1f1b", tensor_groups=used)
