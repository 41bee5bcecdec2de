"""PipeDream's dynamic program against enumeration, on one, two and three levels of the cluster."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import ceil, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_strategies import profiles

from penstock.cluster.cluster import Cluster, Device, Host, Link
from penstock.cluster.toml_file import find_cluster
from penstock.costs.run_tables import run_tables
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem
from penstock.planners.pipedream.pipedream import (
    DynamicProgram,
    Level,
    Window,
    levels_of,
    pipedream,
    pipedream_candidates,
)
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.simulate.score import make_score

ROUNDING = 1e-9


def windows(layers: range, workers: int) -> Iterator[list[tuple[range, int, int]]]:
    """Layers, workers before and workers of all stages, in every way; any worker may stay idle."""

    def rest(lo: int, first: int) -> Iterator[list[tuple[range, int, int]]]:
        if lo == layers.stop:
            yield []
        for hi in range(lo + 1, layers.stop + 1):
            for before in range(first, workers):
                for count in range(1, workers - before + 1):
                    for more in rest(hi, before + count):
                        yield [(range(lo, hi), before, count), *more]

    return rest(layers.start, 0)


class Paper:
    """The recurrence as on paper, by looking at every partition; shares no code with the planner.

    ``counts`` and ``rates`` are those of the levels, lowest first; devices stand in the order of
    their numbers.
    """

    def __init__(self, problem: PlanningProblem, size: int, counts: list[int], rates: list[float]):
        self.problem, self.size, self.counts, self.rates = problem, size, counts, rates
        self.speed = min(device.speed for device in problem.cluster.devices)
        self.known: dict[object, float] = {}

    def unit_devices(self, level: int) -> int:
        """Devices of one worker of a level."""
        devices = 1
        for count in self.counts[:level]:
            devices *= count
        return devices

    def moved_s(self, cut: int, rate: float) -> float:
        """Activations and gradients over a cut, each tensor once."""
        sizes = {
            edge.tensor: edge.bytes.at(self.size) + edge.gradient_bytes.at(self.size)
            for edge in self.problem.profile.edges
            if edge.producer < cut <= edge.consumer
        }
        return sum(sizes.values()) / rate

    def parameter_bytes(self, layers: range) -> float:
        """Of a run of layers; tied ones once, as far as the run uses them."""
        profile = self.problem.profile
        tied = [one.bytes for one in profile.shared if any(i in layers for i in one.layers)]
        return sum(profile.layers[i].parameter_bytes for i in layers) + sum(tied)

    def fits(self, layers: range, replicas: list[int], behind: int) -> bool:
        """Whether a run of layers fits on each of its devices, ``behind`` standing behind them."""
        problem, profile = self.problem, self.problem.profile
        in_flight = ceil((len(replicas) + behind) / len(replicas))
        in_flight = min(in_flight, problem.global_batch // self.size)
        saved = sum(profile.layers[i].saved_bytes.at(self.size) for i in layers)
        inputs = {
            edge.tensor: edge.bytes.at(self.size)
            for edge in profile.edges
            if edge.producer < layers.start and edge.consumer in layers
        }
        again = saved if problem.recompute == "off" else min(saved, sum(inputs.values()))
        state = self.parameter_bytes(layers) * (2 + problem.optimizer_bytes_per_parameter_byte)
        state += sum(profile.layers[i].buffer_bytes for i in layers)
        held = state + (saved + (in_flight - 1) * again) / len(replicas)
        return all(held <= problem.cluster.devices[d].memory_bytes for d in replicas)

    def unit_s(self, level: int, layers: range, units: list[list[int]], behind: int) -> float:
        """Seconds of one unit of a level, of which the others are replicas."""
        key = (level, layers, str(units), behind)
        if key not in self.known:
            self.known[key] = self.new_unit_s(level, layers, units, behind)
        return self.known[key]

    def new_unit_s(self, level: int, layers: range, units: list[list[int]], behind: int) -> float:
        """`unit_s`, not remembered."""
        if level < 0:
            replicas = [unit[0] for unit in units]
            if len(replicas) > self.size or not self.fits(layers, replicas, behind):
                return inf
            profile = self.problem.profile
            passes_s = profile.forward_s(layers, self.size) + profile.backward_s(layers, self.size)
            return passes_s / self.speed
        each = self.unit_devices(level)
        return min(
            self.slowest_s(level, stages, units, behind, each)
            for stages in windows(layers, self.counts[level])
        )

    def slowest_s(
        self,
        level: int,
        stages: list[tuple[range, int, int]],
        units: list[list[int]],
        behind: int,
        each: int,
    ) -> float:
        """The bottleneck of stages on the workers of ``units``, which are replicas."""
        rate, slowest = self.rates[level], 0.0
        for layers, before, count in stages:
            if count * len(units) > self.size:
                return inf
            end = (before + count) * each
            workers = [
                unit[(before + i) * each : (before + i + 1) * each]
                for unit in units
                for i in range(count)
            ]
            later = behind + len(units) * (len(units[0]) - end)
            compute_s = self.unit_s(level - 1, layers, workers, later)
            reduce_s = 4 * (count - 1) * self.parameter_bytes(layers) / (rate * count) / each
            slowest = max(slowest, (compute_s + reduce_s) / count)
            if layers.start > stages[0][0].start:
                slowest = max(slowest, self.moved_s(layers.start, rate) / count)
                slowest = max(slowest, self.moved_s(layers.stop, rate) / count)
        return slowest

    def bottleneck_s(self, plan: Plan) -> float:
        """That of a plan."""
        stages = [(stage.layers, sorted(stage.devices)) for stage in plan.stages]
        everyone = list(range(len(self.problem.cluster.devices)))
        return self.planned_s(len(self.counts) - 1, stages, everyone)

    def planned_s(
        self, level: int, stages: list[tuple[range, list[int]]], unit: list[int]
    ) -> float:
        """The bottleneck of stages on one unit, of which the others are replicas."""
        each = self.unit_devices(level)
        by_workers: dict[tuple[int, ...], list[tuple[range, list[int]]]] = {}
        for layers, devices in stages:
            inside = [device for device in devices if device in unit]
            workers = sorted({(device - unit[0]) // each for device in inside})
            by_workers.setdefault(tuple(workers), []).append((layers, inside))
        rate, slowest = self.rates[level], 0.0
        for workers, part in by_workers.items():
            count, layers = len(workers), range(part[0][0].start, part[-1][0].stop)
            first = unit[workers[0] * each : (workers[0] + 1) * each]
            profile, compute_s = self.problem.profile, 0.0
            if level:
                compute_s = self.planned_s(level - 1, part, first)
            else:
                passes_s = profile.forward_s(layers, self.size)
                compute_s = (passes_s + profile.backward_s(layers, self.size)) / self.speed
            reduce_s = 4 * (count - 1) * self.parameter_bytes(layers) / (rate * count) / each
            slowest = max(slowest, (compute_s + reduce_s) / count)
            if layers.start > stages[0][0].start:
                slowest = max(slowest, self.moved_s(layers.start, rate) / count)
                slowest = max(slowest, self.moved_s(layers.stop, rate) / count)
        return slowest

    def least_s(self) -> float:
        """Of all plans."""
        layers = range(len(self.problem.profile.layers))
        everyone = list(range(len(self.problem.cluster.devices)))
        return self.unit_s(len(self.counts) - 1, layers, [everyone], 0)


def cluster_of_levels(
    counts: list[int], rates: list[float], memories: list[float], speeds: list[float]
) -> Cluster:
    """One level: a host. Two: hosts. Three: racks of hosts, with slow links between the racks."""
    host_devices, hosts = counts[0], 1
    for count in counts[1:]:
        hosts *= count
    devices = [Device("d", memory, speed) for memory, speed in zip(memories, speeds, strict=True)]
    parts = tuple(
        Host(
            f"h{i}",
            tuple(devices[i * host_devices : (i + 1) * host_devices]),
            rates[0],
            rates[1] if len(rates) > 1 else 0.0,
        )
        for i in range(hosts)
    )
    links: list[Link] = []
    if len(counts) == 3:
        rack = host_devices * counts[1]
        for i, j in product(range(len(devices)), repeat=2):
            if i // rack != j // rack:
                links.append(Link(i, j, rates[2]))
    return Cluster("levels", parts, tuple(links))


@st.composite
def levelled_problems(
    draw: st.DrawFn, counts: list[int], memories: st.SearchStrategy[float]
) -> tuple[PlanningProblem, list[float]]:
    """A problem on a cluster of so many levels, each slower than the one below it."""
    devices = 1
    for count in counts:
        devices *= count
    rates = [100.0, 7.0, 1.5][: len(counts)]
    cluster = cluster_of_levels(
        counts,
        rates,
        [draw(memories) for _ in range(devices)],
        [draw(st.sampled_from([1.0, 2.0])) for _ in range(devices)],
    )
    problem = PlanningProblem(
        profile=draw(profiles(3 if devices > 4 else 4)),
        cluster=cluster,
        global_batch=8,
        micro_batch_sizes=(draw(st.sampled_from([1, 2, 4, 8])),),
        recompute=draw(st.sampled_from(["auto", "off"])),
        schedules=("1f1b",),
    )
    return problem, rates


def found_by_program(problem: PlanningProblem) -> float:
    """The least seconds of the slowest stage by the planner's tables."""
    order, levels = levels_of(problem.cluster)
    memory = tuple(problem.cluster.devices[device].memory_bytes for device in order)
    program = DynamicProgram(problem, run_tables(problem), levels, problem.micro_batch_sizes[0])
    return float(program.solved(len(levels) - 1, Window(memory, 1, 0)).value[0, -1, -1])


@pytest.mark.parametrize("memory", ["enough", "scarce"])
@pytest.mark.parametrize("counts", [[4], [2, 2], [3, 2], [2, 3], [1, 2, 2], [2, 2, 2]])
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_the_bottleneck_is_the_least_of_all_partitions_of_all_levels(
    counts: list[int], memory: str, data: st.DataObject
) -> None:
    memories = {"enough": st.just(1e9), "scarce": st.integers(20, 160).map(float)}
    problem, rates = data.draw(levelled_problems(counts, memories[memory]))
    kept = [(count, rate) for count, rate in zip(counts, rates, strict=True) if count > 1]
    order, levels = levels_of(problem.cluster)
    assert order == tuple(range(len(problem.cluster.devices)))
    assert [(level.workers, level.bytes_per_s) for level in levels] == kept
    size = problem.micro_batch_sizes[0]
    paper = Paper(problem, size, [count for count, _ in kept], [rate for _, rate in kept])
    least_s = paper.least_s()
    assert found_by_program(problem) == pytest.approx(least_s, rel=ROUNDING)
    # A plan that does not fit by 1F1B is dropped.
    for candidate in pipedream_candidates(problem):
        assert candidate.estimate_s == pytest.approx(least_s, rel=ROUNDING)
        assert paper.bottleneck_s(candidate.plan) == pytest.approx(least_s, rel=ROUNDING)
    assert memory == "scarce" or list(pipedream_candidates(problem))


def test_levels_are_units_of_equal_size_with_faster_links_inside() -> None:
    two = Host("two", (Device("d", 1e9),) * 2, link_bytes_per_s=9.0, port_bytes_per_s=5.0)
    one = Host("one", (Device("d", 1e9),), link_bytes_per_s=9.0, port_bytes_per_s=3.0)
    assert levels_of(Cluster("unequal", (two, one)))[1] == (Level(3, 1, 3.0),)
    assert levels_of(Cluster("equal", (two, two)))[1] == (Level(2, 1, 9.0), Level(2, 2, 5.0))
    slow_inside = replace(two, link_bytes_per_s=4.0)
    assert levels_of(Cluster("slow inside", (slow_inside,) * 2))[1] == (Level(4, 1, 4.0),)
    assert levels_of(Cluster("alone", (replace(one, link_bytes_per_s=0.0),)))[1] == (
        Level(1, 1, inf),
    )


def test_devices_of_a_level_are_found_wherever_they_stand() -> None:
    """Two racks of two devices, whose numbers alternate."""
    rates = {(i, j): 9.0 if (i + j) % 2 == 0 else 2.0 for i in range(4) for j in range(4) if i != j}
    links = tuple(Link(i, j, rate) for (i, j), rate in rates.items())
    cluster = Cluster("racks", (Host("h", (Device("d", 1e9),) * 4, 1.0),), links)
    assert levels_of(cluster) == ((0, 2, 1, 3), (Level(2, 1, 9.0), Level(2, 2, 2.0)))


def test_memory_of_each_device_decides_where_the_heavy_layers_stand() -> None:
    profile = chain([1000] * 4)
    big = tuple(replace(layer, parameter_bytes=10**9) for layer in profile.layers[2:])
    profile = replace(profile, layers=(*profile.layers[:2], *big))
    small, large = Device("small", 1e6 + 1e5), Device("large", 9e9)
    for devices in ((small, small, large, large), (small, large, small, large)):
        problem = PlanningProblem(profile, Cluster("c", (Host("h", devices, 1e9),)), 8, (1,))
        (candidate,) = pipedream_candidates(problem)
        for stage in candidate.plan.stages:
            if stage.layers.stop > 2:
                assert all(devices[device] == large for device in stage.devices)


def chain(parameter_bytes: list[int]) -> ModelProfile:
    """Equal work in every layer, small tensors between them."""
    work, small = Affine(0.0, 1e-3), Affine(0.0, 1e4)
    layers = tuple(LayerCost(f"l{i}", work, work, work, p) for i, p in enumerate(parameter_bytes))
    edges = tuple(Edge(i, i + 1, f"t{i}", small, small) for i in range(len(layers) - 1))
    return ModelProfile("chain", layers, edges, batch_size=32)


def test_layers_without_many_parameters_are_replicated_and_the_others_are_not() -> None:
    profile = chain([1000] * 9 + [400_000_000] * 3)
    problem = PlanningProblem(profile, find_cluster("dapple-b"), 512, (32,))
    plan = pipedream(problem, make_score(problem))
    assert plan.stages[0].replicas > 1
    assert all(stage.replicas == 1 for stage in plan.stages if stage.layers.stop > 9)


def test_hosts_that_share_a_stage_run_the_same_inner_pipeline() -> None:
    profile = chain([1000])
    problem = PlanningProblem(profile, find_cluster("dapple-a"), 512, (64,))
    plan = pipedream(problem, make_score(problem))
    hosts = problem.cluster.host_index
    for stage in plan.stages:
        counts = [sum(hosts[d] == host for d in stage.devices) for host in (0, 1)]
        assert len({count for count in counts if count}) == 1
    assert any({hosts[d] for d in stage.devices} == {0, 1} for stage in plan.stages)


def test_memory_keeps_a_stage_small() -> None:
    layers = tuple(
        replace(layer, saved_bytes=Affine(0.0, 1e8)) for layer in chain([1000] * 8).layers
    )
    profile = replace(chain([1000] * 8), layers=layers)
    host = Host("h", (Device("d", 14.5e8),) * 4, 1e9)
    problem = PlanningProblem(profile, Cluster("c", (host,)), 8, (1,), recompute="off")
    score = make_score(problem)
    plan = pipedream(problem, score)
    assert score(plan) < inf
    assert len(plan.stages) == 4
