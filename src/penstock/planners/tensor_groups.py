"""Plans whose devices are tensor groups: what they cost, and which groups are worth it.

A group is planned for as one larger device, of a cluster that has groups as devices. What its ranks
do together is in the costs of the layers; its memory and its links are in the cluster.

The costs of a layer on a group of t ranks are computed: the share of the layer that the group
divides takes 1/t of its time, and the group's all-reduces over its own links are added (the time of
a ring, `penstock.cluster.collectives`). If groups of t ranks were measured, all times are
multiplied by one factor. A rank holds 1/t of the divided parameters, and all other tensors whole.
That all activations count as whole is more than what a rank really keeps.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, islice, permutations, product
from math import inf

from penstock.cluster.cluster import Cluster, Device, Host, Link
from penstock.cluster.collectives import all_reduce_costs
from penstock.errors import BadInput, Infeasible
from penstock.plan.ordering import schedule_refusal, stage_refusal
from penstock.plan.plan import MOST_RANKS, Plan, rank_pairs
from penstock.plan.problem import Planner, PlanningProblem, Score
from penstock.profile.model_profile import Affine, LayerCost, ModelProfile, TensorParallelCosts
from penstock.simulate.score import make_score, predict_plan
from penstock.simulate.simulation import Prediction
from penstock.timeline.timeline import Event, MemorySample, Timeline

Groups = tuple[tuple[int, ...], ...]
"""The devices of a cluster in each group; together all devices, each in one group."""

MOST_GROUPINGS = 24
"""The most ways to divide a cluster into groups that are planned for."""


def on_groups(plan: Plan, problem: PlanningProblem) -> tuple[Plan, PlanningProblem]:
    """A plan with tensor groups, and its problem, with the groups as devices.

    Devices of the cluster that are in no group of the plan become groups of their own; devices of
    the plan are renumbered in the order of the cluster. Without its ``tensor_groups`` the plan
    is one for the new problem. A plan that has none is returned as it is.
    """
    if not plan.tensor_groups:
        return plan, problem
    cluster = problem.cluster
    known = {rank for group in plan.tensor_groups for rank in group}
    if max(known) >= len(cluster.devices):
        raise BadInput(
            f"the plan's tensor groups use rank {max(known)} and cluster '{cluster.name}' has "
            f"{len(cluster.devices)} devices; plan again for this cluster"
        )
    if len(problem.profile.layers) != plan.stages[-1].layers.stop:
        raise BadInput(
            f"the plan covers {plan.stages[-1].layers.stop} layers and profile "
            f"'{problem.profile.name}' has {len(problem.profile.layers)}; plan again with it"
        )
    left = [(rank,) for rank in range(len(cluster.devices)) if rank not in known]
    every = tuple(sorted((*plan.tensor_groups, *left)))
    place = {group: number for number, group in enumerate(every)}
    stages = tuple(
        replace(stage, devices=tuple(place[plan.ranks_of(d)] for d in stage.devices))
        for stage in plan.stages
    )
    of_layer = [[*map(plan.ranks_of, stage.devices)] for stage in plan.stages for _ in stage.layers]
    profile = profile_on(problem.profile, cluster, of_layer)
    renumbered = replace(plan, stages=stages, tensor_groups=every)
    return renumbered, replace(problem, profile=profile, cluster=grouped_cluster(cluster, every))


def without_groups(plan: Plan) -> Plan:
    """The plan for a problem whose devices are its groups."""
    return replace(plan, tensor_groups=())


def profile_on(
    profile: ModelProfile, cluster: Cluster, groups_of_layer: Sequence[Sequence[tuple[int, ...]]]
) -> ModelProfile:
    """The profile of one rank if each layer runs on the given groups, all of one size."""
    layers: list[LayerCost] = []
    for index, (layer, groups) in enumerate(zip(profile.layers, groups_of_layer, strict=True)):
        ranks = max(len(group) for group in groups)
        if ranks == 1:
            layers.append(layer)
            continue
        costs = divided_costs(profile)
        share = costs.divided[index]
        left = 1 - share + share / ranks
        sums, factor = slowest_sums(cluster, groups, costs, index), costs.factor(ranks)
        layers.append(
            replace(
                layer,
                forward_s=(layer.forward_s.scaled(left) + sums).scaled(factor),
                backward_input_s=(layer.backward_input_s.scaled(left) + sums).scaled(factor),
                backward_weight_s=layer.backward_weight_s.scaled(left * factor),
                parameter_bytes=round(layer.parameter_bytes * left),
            )
        )
    return replace(profile, layers=tuple(layers), by_length=())


def divided_costs(profile: ModelProfile) -> TensorParallelCosts:
    """The costs that a group divides; refused where the profile does not have them."""
    if profile.tensor_parallel is None:
        raise BadInput(
            f"profile '{profile.name}' does not say what a tensor group divides; add it with "
            f"penstock.measure.tensor_parallel.with_tensor_parallel"
        )
    return profile.tensor_parallel


def slowest_sums(
    cluster: Cluster, groups: Sequence[tuple[int, ...]], costs: TensorParallelCosts, layer: int
) -> Affine:
    """Seconds of a layer's all-reduces in one direction on the slowest of ``groups``.

    They are at speed 1, like all times of a profile, although they do not depend on the speed.
    """
    count, size = costs.sums[layer] / 2, costs.sum_bytes_per_sample[layer] / 2

    def seconds(group: tuple[int, ...]) -> Affine:
        speed = min(cluster.devices[device].speed for device in group)
        found = [
            Affine(count * cost.latency_s, size * cost.s_per_byte).scaled(speed)
            for cost in all_reduce_costs(cluster, group)
        ]
        return min(found, key=lambda cost: cost.at(1), default=Affine())

    return max(map(seconds, groups), key=lambda cost: cost.at(1))


def one_each(cluster: Cluster) -> Groups:
    """Every device as a group of its own."""
    return tuple((device,) for device in range(len(cluster.devices)))


def grouped_cluster(
    cluster: Cluster, groups: Groups, speed_up: Callable[[tuple[int, ...]], float] = lambda _: 1.0
) -> Cluster:
    """The cluster with each group as one device, in the order of ``groups``.

    A group has the speed of its slowest device times ``speed_up(group)``, and the memory of its
    smallest: what each of its ranks holds is in the profile. Every rank of a group receives whole
    activations, from one rank of the sending group. So a port of a host carries them as often as
    the host's largest group has ranks. A rank that sends to several ranks of a larger group on its
    host takes as many times as long.
    """
    every, host_of = range(len(cluster.devices)), cluster.host_index
    is_complete = sorted(device for group in groups for device in group) == [*every]
    found = [sorted({host_of[device] for device in group}) for group in groups if is_complete]
    if not found or any(len(on) != 1 for on in found) or found != sorted(found):
        raise BadInput(
            f"tensor groups {[list(group) for group in groups]} do not have each device of cluster "
            f"'{cluster.name}' once, host by host; a group needs devices of one host"
        )

    def on_groups_of(index: int) -> Host:
        host, own = cluster.hosts[index], [g for g in groups if host_of[g[0]] == index]
        largest = max(map(len, own), default=1)
        return replace(
            host,
            devices=tuple(merged(cluster, group, speed_up(group)) for group in own),
            port_bytes_per_s=host.port_bytes_per_s / largest,
            full_speed_devices=-(-host.full_speed_devices // largest),
        )

    name = cluster.name if groups == one_each(cluster) else f"{cluster.name}, in groups"
    hosts = tuple(map(on_groups_of, range(len(cluster.hosts))))
    return replace(cluster, name=name, hosts=hosts, links=tuple(links_between(cluster, groups)))


def merged(cluster: Cluster, group: tuple[int, ...], speed_up: float) -> Device:
    """A group as a device."""
    devices = [cluster.devices[device] for device in group]
    if len(devices) == 1:
        return devices[0]
    kinds = sorted({device.kind for device in devices})
    if len(kinds) > 1:
        raise BadInput(
            f"tensor group {list(group)} has devices of the kinds {', '.join(kinds)}; its ranks "
            f"wait for one another, so give it devices of one kind"
        )
    slowest = min(device.speed for device in devices)
    return replace(
        devices[0],
        kind=f"{len(group)} x {kinds[0]}",
        speed=slowest * speed_up,
        memory_bytes=min(device.memory_bytes for device in devices),
        peak_flops_per_s=len(group) * min(device.peak_flops_per_s for device in devices),
    )


def links_between(cluster: Cluster, groups: Groups) -> Iterator[Link]:
    """The links between groups whose devices have links of their own, or that differ in size."""
    group_of = {device: number for number, group in enumerate(groups) for device in group}
    linked = {(group_of[a], group_of[b]) for a, b in cluster.special_links}
    of_host = groupby(range(len(groups)), lambda number: cluster.host_index[groups[number][0]])
    on_hosts = {pair for _, own in of_host for pair in permutations(own, 2)}
    for source, target in sorted(linked | on_hosts):
        pairs = [(a, b) for a in groups[source] for b in groups[target]]
        copies = -(-len(groups[target]) // len(groups[source]))
        own_link = any(pair in cluster.special_links for pair in pairs)
        if source != target and (own_link or copies > 1):
            rate = min(cluster.bandwidth(a, b) for a, b in pairs)
            delay_s = max(cluster.latency(a, b) for a, b in pairs)
            yield Link(source, target, rate / copies, delay_s)


def groupings(cluster: Cluster, sizes: Sequence[int]) -> Iterator[Groups]:
    """Ways to divide a cluster into groups of the given sizes, ungrouped first.

    On each host larger groups come first, and hosts with equal devices are divided equally, unless
    there are few ways. A group has neighbouring devices of one kind, as tensor parallelism needs
    fast links.
    """
    ways = [list(ways_of_host(cluster, host, sizes)) for host in range(len(cluster.hosts))]
    known = dict.fromkeys([one_each(cluster)])
    for number in range(max(map(len, ways))):
        of_number = [own[min(number, len(own) - 1)] for own in ways]
        known.setdefault(tuple(group for own in of_number for group in own))
    for chosen in islice(product(*ways), MOST_GROUPINGS):
        known.setdefault(tuple(group for own in chosen for group in own))
    yield from islice(known, MOST_GROUPINGS)


def ways_of_host(cluster: Cluster, host: int, sizes: Sequence[int]) -> Iterator[Groups]:
    """Ways to divide one host's devices into neighbouring groups, larger ones first."""
    devices = [d for d, index in enumerate(cluster.host_index) if index == host]

    def divide(start: int, largest: int) -> Iterator[Groups]:
        if start == len(devices):
            yield ()
        for size in sorted({1, *sizes}):
            group = tuple(devices[start : start + size])
            kinds = {cluster.devices[device].kind for device in group}
            if size <= largest and len(group) == size and len(kinds) == 1:
                for rest in divide(start + size, size):
                    yield group, *rest

    return divide(0, max({1, *sizes}))


def plan_with_groups(problem: PlanningProblem, sizes: Sequence[int], find: Planner) -> Plan:
    """The fastest plan by simulation, with tensor groups of the given sizes or without any.

    ``find`` is called for each of `groupings`, with a problem whose devices are the groups. Where
    these have different sizes, the layers' costs are not known before the plan is. So the planner
    then takes a group for a faster device, with the parameters of each of the sizes in turn. Its
    plans are scored with the costs that their layers really have.
    """
    divided_costs(problem.profile)
    best: Plan | None = None
    limit_s = inf
    refused: Infeasible | None = None
    for groups in groupings(problem.cluster, sizes):
        score = score_on(problem, groups)
        for view in views_without_groups(problem, groups):
            try:
                found = find(view, score)
            except Infeasible as cause:
                refused = refused or cause
                continue
            if score(found) == inf:
                continue
            grouped = groups != one_each(problem.cluster)
            plan, own = on_groups(replace(found, tensor_groups=groups * grouped), problem)
            prediction = predict_plan(own, without_groups(plan), with_timeline=False)
            # A plan must be so much faster that it is worth its groups.
            if prediction.fits and prediction.iteration_s < limit_s * (1 - own.as_fast * grouped):
                best, limit_s = plan, prediction.iteration_s
    if best is None:
        raise refused or Infeasible("no plan with these tensor groups fits; allow other sizes")
    return best


def group_sizes(text: str) -> tuple[int, ...]:
    """The sizes of tensor groups in a list such as "2,4"; none in an empty text."""
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() and 1 <= int(part) <= MOST_RANKS for part in parts):
        raise BadInput(
            f"tensor groups '{text}' must be numbers of ranks from 1 to {MOST_RANKS} with commas "
            f"between them, such as 2,4"
        )
    return tuple(sorted(set(map(int, parts))))


def score_on(problem: PlanningProblem, groups: Groups) -> Score:
    """The simulator's score of plans for groups as devices, with the costs of layers on them.

    Infinite for what cannot be divided equally: replicas of a stage on groups of different sizes,
    or layers that share a parameter; and for cuts between layers whose groups pass on shards.
    """
    cluster, grouped = problem.cluster, grouped_cluster(problem.cluster, groups)
    scores: dict[tuple[int, ...], Score] = {}
    joined = divided_costs(problem.profile).joined

    def score(plan: Plan) -> float:
        if any(len({len(groups[d]) for d in stage.devices}) > 1 for stage in plan.stages):
            return inf
        sizes = tuple(len(groups[s.devices[0]]) for s in plan.stages for _ in s.layers)
        if any(len({sizes[n] for n in tied.layers}) > 1 for tied in problem.profile.shared):
            return inf
        cuts = (stage.layers.start for stage in plan.stages[1:])
        if any(max(sizes[cut - 1], sizes[cut]) > 1 for cut in cuts if cut - 1 in joined):
            return inf
        layers = zip(problem.profile.layers, sizes, strict=True)
        if any(stage_refusal(norms=layer.norms > 0, ranks=ranks) for layer, ranks in layers):
            return inf
        if sizes not in scores:
            on = [[group for group in groups if len(group) == size] for size in sizes]
            profile = profile_on(problem.profile, cluster, on)
            scores[sizes] = make_score(replace(problem, profile=profile, cluster=grouped))
        return scores[sizes](plan)

    return score


def views_without_groups(problem: PlanningProblem, groups: Groups) -> Iterator[PlanningProblem]:
    """The problem as seen by a planner without tensor groups."""
    sizes, whole = sorted({len(group) for group in groups}, reverse=True), problem.profile
    if sizes == [1]:
        yield problem
        return
    names = [n for n in problem.schedules if not schedule_refusal(n, tensor_groups=True)]
    every = range(len(whole.layers))

    def speed_up(group: tuple[int, ...]) -> float:
        """Speedup of a group over one of its devices, for the whole model."""
        both = (
            profile_on(whole, problem.cluster, [[on]] * len(every)) for on in (group[:1], group)
        )
        alone_s, together_s = (profile.work_s(every, whole.batch_size) for profile in both)
        return alone_s / together_s if together_s > 0 else 1.0

    for size in sizes if names else ():
        of_size = [group for group in groups if len(group) == size]
        profile = profile_on(whole, problem.cluster, [of_size] * len(every))
        cluster = grouped_cluster(problem.cluster, groups)
        if len(sizes) > 1:
            cluster = grouped_cluster(problem.cluster, groups, speed_up)
            own = tuple(
                replace(layer, parameter_bytes=divided.parameter_bytes)
                for layer, divided in zip(whole.layers, profile.layers, strict=True)
            )
            profile = replace(profile, layers=own)
        yield replace(problem, profile=profile, cluster=cluster, schedules=tuple(names))


def on_ranks(prediction: Prediction, plan: Plan, ranks: int) -> Prediction:
    """``prediction``, whose devices are the tensor groups of ``plan``, for each of ``ranks`` ranks.

    Every rank of a group does what the group does, at the same time, and needs the memory that is
    predicted for the group. A message from group to group becomes one for each receiving rank. A
    plan without tensor groups has its prediction already.
    """
    if not plan.tensor_groups:
        return prediction
    whole, groups = prediction.timeline, plan.tensor_groups
    events = sorted(
        (own for event in whole.events for own in copies(event, groups)),
        key=lambda event: (event.start_s, event.device, event.end_s),
    )
    memory = tuple(
        MemorySample(rank, sample.time_s, sample.bytes)
        for sample in whole.memory
        for rank in groups[sample.device]
    )
    each = zip(groups, prediction.peak_memory_bytes, strict=False)
    peaks = {rank: peak for group, peak in each for rank in group}
    return replace(
        prediction,
        timeline=Timeline(tuple(events), ranks, memory, whole.title),
        peak_memory_bytes=tuple(peaks.get(rank, 0.0) for rank in range(ranks)),
        too_full=tuple(rank for device in prediction.too_full for rank in groups[device]),
    )


def copies(event: Event, groups: Groups) -> Iterator[Event]:
    """An event of a device on each of its ranks."""
    own, others = groups[event.device], groups[event.peer]
    if event.peer < 0:
        yield from (replace(event, device=rank) for rank in own)
    elif event.kind == "SEND":
        for sender, receiver in rank_pairs(own, others):
            yield replace(event, device=sender, peer=receiver)
    else:
        for sender, receiver in rank_pairs(others, own):
            yield replace(event, device=receiver, peer=sender)
