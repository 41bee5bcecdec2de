"""Measures how fast tensor groups really are, by training on them with the workers of a job.

The costs of a layer on a group are computed from its costs on one rank
(`penstock.planning.tensor_groups`). That leaves out what dividing costs besides the sums: every
operator on shards has an overhead, and smaller matrix products use a device less well. So the whole
model runs forward and backward on groups, as the runtime does it, and on single ranks. For each
size of groups one factor says how many times as long as computed it takes.
"""

from collections.abc import Sequence
from statistics import median

from penstock.capture.layer_graph import LayerGraph
from penstock.cluster.cluster import Cluster
from penstock.cluster.tensor_groups import Groups
from penstock.jobs.job import Job
from penstock.plan.plan import Plan, Stage
from penstock.plan.row_split import split_rows
from penstock.planning.tensor_groups import profile_on
from penstock.profile.model_profile import ModelProfile
from penstock.runtime.pipeline import Pipeline

__all__ = ["measured_factors"]

STEPS = 4
"""Steps of each measurement; the first is not counted."""


def measured_factors(
    job: Job, graph: LayerGraph, profile: ModelProfile, cluster: Cluster, device: str
) -> dict[int, float]:
    """How many times as long as computed the model takes on groups, by their size.

    All workers must call this; as many of them as possible compute at the same time. Times are
    relative to those of single ranks by ``profile`` and by the same kind of measurement, so what
    the two have in common does not count.

    Raises:
        BadInput: the model cannot be divided.
    """
    found: dict[int, float] = {}
    alone = excess(job, graph, profile, cluster, groups_of(cluster, 1), device)
    for size in job.tensor_parallel.ranks:
        groups = groups_of(cluster, size)
        if groups:
            found[size] = excess(job, graph, profile, cluster, groups, device) / alone
    return found


def groups_of(cluster: Cluster, size: int) -> Groups:
    """As many groups of neighbours on one host as there are."""
    hosts: list[list[int]] = [[] for _ in cluster.hosts]
    for rank, host in enumerate(cluster.host_index):
        hosts[host].append(rank)
    return tuple(
        tuple(ranks[first : first + size])
        for ranks in hosts
        for first in range(0, len(ranks) - size + 1, size)
    )


def excess(
    job: Job,
    graph: LayerGraph,
    profile: ModelProfile,
    cluster: Cluster,
    groups: Groups,
    device: str,
) -> float:
    """How many times as long as computed the groups, as replicas of the model, really take."""
    plan = plan_of(job, groups, len(profile.layers))
    computed = profile_on(profile, cluster, [groups] * len(profile.layers))
    with Pipeline(
        graph,
        plan,
        job.example_batch(),
        verify="off",
        device=device,
        seed=job.seed,
        compare_replicas_every=0,
        tensor_parallel=job.tensor_parallel.layers,
    ) as pipe:
        measured = [busy_s(pipe, job) for _ in range(STEPS)][1:]
    (stage,) = plan.stages
    every = range(len(profile.layers))
    factors: list[float] = []
    for replica, rows in zip(stage.devices, stage.slices, strict=True):
        expected_s = computed.forward_s(every, rows) + computed.backward_s(every, rows)
        for rank in plan.ranks_of(replica):
            seconds = median(step[rank] for step in measured)
            factors.append(seconds / (plan.micro_batches * expected_s))
    return median(factors)


def plan_of(job: Job, groups: Groups, layers: int) -> Plan:
    """The whole model on each of ``groups``, with a usual micro-batch of the job."""
    choices = sorted(job.micro_batch_choices())
    enough = [size for size in choices if size >= len(groups)] or choices[-1:]
    size = enough[len(enough) // 2]
    used = groups[:size]
    stage = Stage(range(layers), tuple(range(len(used))), split_rows(size, (1.0,) * len(used)))
    return Plan((stage,), job.batch_size // size, size, "1f1b", tensor_groups=used)


def busy_s(pipe: Pipeline, job: Job) -> Sequence[float]:
    """Take a step, which changes no weight; the seconds that each rank computed."""
    pipe.step(job.example_batch())
    timeline = pipe.timeline()
    seconds = [0.0] * timeline.devices
    for event in timeline.events:
        if event.kind in "FB":
            seconds[event.device] += event.end_s - event.start_s
    return seconds
