"""The length of an iteration, divided by the resource that the critical path waits for."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from penstock.cluster.cluster import Cluster
from penstock.timeline.critical_path import PathStep, critical_path
from penstock.timeline.metrics import COMPUTE, covered_s
from penstock.timeline.timeline import Event, Timeline

ShareKind: TypeAlias = Literal[
    "compute",
    "fill and drain",
    "other stages",
    "recompute",
    "transfers",
    "all-reduce",
    "optimizer step",
    "waiting",
]


NETWORK = ("SEND", "RECV", "REDUCE")
"""Events that engines, links and ports carry."""

ROUNDING = 1e-9
"""A share below this part of the iteration is rounding."""


@dataclass(frozen=True, slots=True)
class PathShare:
    """Seconds of the critical path of one kind, and where most of them are spent.

    - *compute*: the forwards and backwards of the stage that computes most of the path;
    - *fill and drain*: one forward and one backward of every other stage, which a micro-batch has
      to pass in any pipeline;
    - *other stages*: what they compute beyond that, because stages wait for one another.
    """

    kind: ShareKind
    seconds: float
    where: str = ""


@dataclass(frozen=True, slots=True)
class AllReduce:
    """The gradient all-reduce of a stage.

    Its device computes during ``hidden_s`` of its ``seconds``. It ends ``after_s`` after the last
    backward.
    """

    stage: int
    seconds: float
    hidden_s: float
    after_s: float


@dataclass(frozen=True, slots=True)
class Utilisation:
    """A resource and the share of the iteration in which it is occupied.

    ``carries``: the resource is an engine, a link or a port, not a device that computes.
    """

    resource: str
    share: float
    carries: bool = False


def path_shares(timeline: Timeline, cluster: Cluster) -> tuple[PathShare, ...]:
    """All kinds that occur, the longest first; their seconds add up to the iteration."""
    path = critical_path(timeline)
    centre, passed = busiest_stage(path), set[tuple[int, str]]()
    seconds: dict[ShareKind, float] = defaultdict(float)
    places: dict[ShareKind, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for step in path:
        kind = kind_of_share(step.event, centre, passed)
        seconds[kind] += step.seconds
        places[kind][place_of_event(step.event, cluster)] += step.seconds
        seconds["waiting"] += step.waited_s
    shares = [
        PathShare(kind, total_s, longest(places[kind]))
        for kind, total_s in seconds.items()
        if total_s > ROUNDING * sum(seconds.values())
    ]
    return tuple(sorted(shares, key=lambda share: -share.seconds))


def busiest_stage(path: Sequence[PathStep]) -> int:
    """The stage that computes most of the path; the first of equal ones."""
    seconds: dict[int, float] = defaultdict(float)
    for step in path:
        if step.event.kind in ("F", "B", "I", "W"):
            seconds[step.event.stage] += step.seconds
    return max(seconds, key=lambda stage: (seconds[stage], -stage), default=-1)


def kind_of_share(event: Event, centre: int, passed: set[tuple[int, str]]) -> ShareKind:
    """The kind of share of an event of the path; ``passed``: stages and directions so far."""
    match event.kind:
        case "SEND" | "RECV":
            return "transfers"
        case "REDUCE":
            return "all-reduce"
        case "STEP":
            return "optimizer step"
        case "R":
            return "recompute"
        case "F" | "B" | "I" | "W":
            if event.stage == centre:
                return "compute"
            direction = (event.stage, "down" if event.kind == "F" else "up")
            if direction in passed:
                return "other stages"
            passed.add(direction)
            return "fill and drain"


def place_of_event(event: Event, cluster: Cluster) -> str:
    """The place of an event: its stage, or the hosts of a message."""
    if event.kind not in ("SEND", "RECV"):
        return f"stage {event.stage}"
    ends = (event.device, event.peer) if event.kind == "SEND" else (event.peer, event.device)
    names = [cluster.hosts[cluster.host_index[device]].name for device in ends]
    if names[0] == names[1]:
        return f"inside {names[0]}"
    return f"from {names[0]} to {names[1]}"


def longest(seconds: dict[str, float]) -> str:
    """The place with the most seconds; "mostly" where there are others."""
    most = max(seconds, key=lambda place: seconds[place], default="")
    return f"mostly {most}" if len(seconds) > 1 else most


def all_reduces(timeline: Timeline) -> tuple[AllReduce, ...]:
    """The all-reduce of every stage that has one, on the device where it ends last."""
    backwards: dict[int, list[Event]] = defaultdict(list)
    reducing: dict[int, list[Event]] = defaultdict(list)
    for event in timeline.events:
        if event.kind == "REDUCE":
            reducing[event.device].append(event)
        elif event.kind in COMPUTE and event.kind != "STEP":
            backwards[event.device].append(event)
    found: dict[int, AllReduce] = {}
    for device, events in reducing.items():
        own = all_reduce_beside(events, backwards[device])
        if own.stage not in found or own.after_s > found[own.stage].after_s:
            found[own.stage] = own
    return tuple(found[stage] for stage in sorted(found))


def all_reduce_beside(reducing: Sequence[Event], computing: Sequence[Event]) -> AllReduce:
    """The all-reduce of one device, beside what it computes."""
    reducing_s, computing_s = covered_s(reducing), covered_s(computing)
    ended_s = max((event.end_s for event in computing), default=0.0)
    return AllReduce(
        stage=reducing[0].stage,
        seconds=reducing_s,
        hidden_s=reducing_s + computing_s - covered_s([*reducing, *computing]),
        after_s=max(0.0, max(event.end_s for event in reducing) - ended_s),
    )


def utilisations(timeline: Timeline, cluster: Cluster) -> tuple[Utilisation, ...]:
    """Every device's computing and every link and port in use, the busiest first."""
    end_s = max((event.end_s for event in timeline.events), default=0.0)
    users: dict[tuple[int, str], list[Event]] = defaultdict(list)
    hosts_of = hosts_of_reductions(timeline.events, cluster)
    for event in timeline.events:
        for resource in resources_of(event, cluster, hosts_of):
            users[resource].append(event)
    shares = [
        Utilisation(name, covered_s(events) / end_s, events[0].kind in NETWORK)
        for (_, name), events in users.items()
    ]
    return tuple(sorted(shares, key=lambda u: -u.share))


def has_own_link(event: Event, cluster: Cluster) -> bool:
    """Return whether a message passes a link that belongs to its two devices alone."""
    hosts = {cluster.host_index[device] for device in (event.device, event.peer)}
    return len(hosts) == 1 and cluster.hosts[hosts.pop()].separate_links


def link_of(event: Event, cluster: Cluster) -> str:
    """The link between a message's devices; one for both directions where it is half duplex."""
    ends = (event.device, event.peer) if event.kind == "SEND" else (event.peer, event.device)
    if cluster.hosts[cluster.host_index[event.device]].half_duplex:
        return f"the link between devices {min(ends)} and {max(ends)}"
    return f"the link from device {ends[0]} to {ends[1]}"


def hosts_of_reductions(
    events: Iterable[Event], cluster: Cluster
) -> dict[tuple[float, float, float], set[int]]:
    """The hosts of each gradient bucket's devices; the times and bytes identify a bucket."""
    hosts: dict[tuple[float, float, float], set[int]] = defaultdict(set)
    for event in events:
        if event.kind == "REDUCE":
            key = (event.start_s, event.end_s, event.bytes)
            hosts[key].add(cluster.host_index[event.device])
    return hosts


def resources_of(
    event: Event, cluster: Cluster, hosts_of: dict[tuple[float, float, float], set[int]]
) -> list[tuple[int, str]]:
    """Resources that an event occupies: its device, a link, or its engines and its host's port.

    Each with the number of its device or host, since hosts may have the same name.
    """
    device, host = event.device, cluster.host_index[event.device]
    name = cluster.hosts[host].name
    match event.kind:
        case "SEND" | "RECV" if has_own_link(event, cluster):
            return [(-1, link_of(event, cluster))]
        case "SEND":
            crosses = cluster.uses_port(device, event.peer)
            out = (host, f"the outgoing port of {name}")
            return [out if crosses else (device, f"sending from device {device}")]
        case "RECV":
            crosses = cluster.uses_port(event.peer, device)
            into = (host, f"the incoming port of {name}")
            return [into if crosses else (device, f"receiving on device {device}")]
        case "REDUCE":
            if len(hosts_of[event.start_s, event.end_s, event.bytes]) > 1:
                ports = (f"the outgoing port of {name}", f"the incoming port of {name}")
                return [(host, port) for port in ports]
            engines = (f"sending from device {device}", f"receiving on device {device}")
            return [(device, engine) for engine in engines]
        case "F" | "B" | "I" | "W" | "R" | "STEP":
            return [(device, f"computing on device {device} (stage {event.stage})")]
