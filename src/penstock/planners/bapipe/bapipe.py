"""BaPipe's planner: explores schedules, micro-batch sizes and balanced straight pipelines."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, pairwise

from penstock.cluster.cluster import Cluster
from penstock.costs.infeasible import infeasible
from penstock.costs.run_tables import at
from penstock.costs.stage_costs import depth_function
from penstock.costs.tables import ChainCosts, whole_chain
from penstock.errors import Infeasible
from penstock.plan.plan import Plan, Stage
from penstock.plan.problem import PlanningProblem, Score
from penstock.planners.bapipe.formulas import (
    METHODS,
    features_kept,
    method_of,
    mini_batch_s,
    pace_s,
)
from penstock.planners.choice import Candidate, best_candidate
from penstock.planners.coarse_chain import few_sizes
from penstock.planners.data_parallel import one_stage_candidates
from penstock.planners.gpipe import fastest_devices

TRIES = 1
"""Plans of each micro-batch size that are simulated."""


def bapipe(problem: PlanningProblem, score: Score) -> Plan:
    """BaPipe's plan: a straight pipeline over all accelerators, or data parallelism.

    A pipeline is made for every micro-batch size and every schedule that the problem allows. Of
    BaPipe's own four schedules only those for the accelerators count (`methods_for`). The steps:

    1. inter-layer partition in proportion to speed;
    2. coarse-grained partition, where a boundary's transfer takes longer than a stage computes;
    3. where a stage reads parameters from off-chip memory, moves of border layers that shorten the
       slowest stage;
    4. memory fine tuning;
    5. the closed form of the schedule.

    BaPipe's formulas choose the schedule of every micro-batch size. ``score`` chooses among the
    sizes, and between a pipeline and data parallelism. The formulas would choose between these
    two, but they count an all-reduce that overlaps nothing.

    Other schedules are judged by the closed form of the most similar one of BaPipe's own. Layers
    are not divided between neighbours (BaPipe's intra-layer partition). BaPipe does not recompute.
    Recompute is tried only where nothing fits without, or where the problem requires
    it.

    Source: Zhao et al., arXiv 2012.12544.
    """
    problem = problem.under(methods_for(problem))
    every_size = tuple(sorted(problem.micro_batch_sizes))
    for sizes in dict.fromkeys((few_sizes(problem), every_size)):
        for recompute in problem.recompute_choices:
            few = replace(problem, micro_batch_sizes=sizes, recompute="on" if recompute else "off")
            pipelines = list(straight_pipelines(few, recompute=recompute))
            widest = min(len(few.cluster.devices), max(sizes))
            whole = list(one_stage_candidates(few, widest))
            best: list[Plan] = []
            for found in (pipelines, whole):
                with suppress(Infeasible):
                    best.append(
                        best_candidate(problem, found, score, planner="bapipe", tries=TRIES)
                    )
            if best:
                return min(best, key=score)
    raise infeasible(problem, "bapipe")


def methods_for(problem: PlanningProblem) -> tuple[str, ...]:
    """The allowed schedules; of BaPipe's own, only those for the cluster's accelerators.

    Names that end in -as are for accelerators with ``concurrent_passes``, such as FPGAs. Of the
    others '1f1b-so' is for those that compute while they send. If nothing is left, all allowed
    schedules.
    """
    cluster = problem.cluster
    unfit = {name for name in METHODS if name.endswith("-as") != is_asynchronous(cluster)}
    if not all(device.overlaps_communication for device in cluster.devices):
        unfit.add("1f1b-so")
    return tuple(name for name in problem.schedules if name not in unfit) or problem.schedules


def straight_pipelines(problem: PlanningProblem, *, recompute: bool) -> Iterator[Candidate]:
    """A balanced straight pipeline for every micro-batch size and schedule, where one fits."""
    chain = whole_chain(problem)
    for size in problem.micro_batch_sizes:
        for schedule in problem.schedules:
            yield from straight_pipeline(chain, size, schedule, recompute)


def is_asynchronous(cluster: Cluster) -> bool:
    """Return whether all accelerators run several passes and transfers at once, as FPGAs do."""
    return all(device.concurrent_passes for device in cluster.devices)


def straight_pipeline(
    chain: ChainCosts, size: int, schedule: str, recompute: bool
) -> Iterator[Candidate]:
    """The layers on a chain of single accelerators, balanced and tuned, if they fit there.

    All of a cluster's accelerators, or the fastest where there are fewer layers. The estimate is
    BaPipe's mini-batch time, in which a link that is slower than computing sets the pace.
    """
    problem, cluster, profile = chain.problem, chain.problem.cluster, chain.problem.profile
    places, micro_batches = fastest_devices(problem), problem.global_batch // size
    devices = [cluster.devices[place] for place in places]
    speeds = [device.speed for device in devices]
    method = method_of(schedule, asynchronous=is_asynchronous(cluster))
    costs = chain.costs([(place,) for place in places], [(size,)] * len(places))
    layers_s = [
        layer.forward_s.at(size) * (1 + recompute) + layer.backward_s.at(size)
        for layer in profile.layers
    ]
    transfers_s = one_way_s(chain, places, size)

    def busy_s(stage: int, lo: int, hi: int) -> float:
        """Forward and backward of a micro-batch on a stage's accelerator, with off-chip reads."""
        again_s = costs.forward_s(stage, lo, hi) if recompute else 0.0
        return costs.micro_batch_s(stage, lo, hi) + again_s

    def needed_bytes(stage: int, lo: int, hi: int) -> float:
        """Peak memory of a stage, for BaPipe's own schedules with the depth of its table."""
        if schedule == method:
            depth = min(features_kept(method, stage=stage, stages=stages), micro_batches)
        else:
            depth = depth_function(schedule)(stages - stage, micro_batches)
        return costs.needed_bytes(stage, lo, hi, depth, recompute)

    cuts = inter_layer_cuts(layers_s, speeds, range(1, len(layers_s)))
    busiest_s = bottleneck(cuts, busy_s)
    if any(transfers_s[cut] > busiest_s for cut in cuts[1:-1]):
        cuts = inter_layer_cuts(layers_s, speeds, coarse_cuts(transfers_s, busiest_s))
    stages = len(cuts) - 1
    runs = zip(pairwise(cuts), devices, strict=False)
    if any(d.chip.read_s(float(chain.runs.parameters[run])) > 0 for run, d in runs):
        cuts = tuned_to_chips(cuts, busy_s)
    memory_bytes = [device.memory_bytes for device in devices[:stages]]
    cuts = memory_fine_tuned(cuts, memory_bytes, needed_bytes, busy_s)
    if not cuts:
        return
    made = tuple(
        Stage(range(lo, hi), (place,), (size,), recompute)
        for (lo, hi), place in zip(pairwise(cuts), places, strict=False)
    )
    busiest_s, whole_s = bottleneck(cuts, busy_s), sum(layers_s)
    forwards_s = profile.forward_s(range(len(layers_s)), size)
    transfer_s = max((transfers_s[cut] for cut in cuts[1:-1]), default=0.0)
    forward_s = busiest_s * min(1.0, forwards_s / whole_s) if whole_s > 0 else 0.0
    pace = pace_s(
        method, forward_s=forward_s, backward_s=busiest_s - forward_s, transfer_s=transfer_s
    )
    estimate_s = mini_batch_s(
        method, micro_batches=micro_batches, stages=stages, busy_s=pace, transfer_s=transfer_s
    )
    yield Candidate(Plan(made, micro_batches, size, schedule), estimate_s)


def one_way_s(chain: ChainCosts, places: Sequence[int], size: int) -> list[float]:
    """Seconds to send what crosses each cut one way, over the slowest link of a chain."""
    cluster, links = chain.problem.cluster, list(pairwise(places))
    slowest = max((1 / cluster.bandwidth(*link) for link in links), default=0.0)
    latency_s = max((cluster.latency(*link) for link in links), default=0.0)
    sizes = at(chain.runs.down, size).tolist()
    return [latency_s + size * slowest if size > 0 else 0.0 for size in sizes]


def inter_layer_cuts(
    times: Sequence[float], speeds: Sequence[float], allowed: Sequence[int]
) -> tuple[int, ...]:
    """Cut a chain so that every accelerator's share of the time is nearest to its share of speed.

    The ``allowed`` cuts are inside the chain and rising. Cut ``k`` is the one whose prefix sum is
    nearest to the share of the first ``k`` speeds; the first of equal ones. Each stage has at least
    one layer. With too few allowed cuts there are fewer stages, with the first speeds.

    >>> inter_layer_cuts([1, 1, 1, 1, 2], [1, 1, 2], [1, 2, 3, 4])
    (0, 1, 3, 5)
    """
    prefix = list(accumulate(times, initial=0.0))
    stages = min(len(speeds), len(allowed) + 1)
    power = list(accumulate(speeds[:stages]))
    cuts = [0]
    first = 0
    for k in range(stages - 1):
        target = prefix[-1] * power[k] / power[-1]
        last = len(allowed) - (stages - 2 - k)
        best = min(range(first, last), key=lambda i: abs(prefix[allowed[i]] - target))
        cuts.append(allowed[best])
        first = best + 1
    return (*cuts, len(times))


def coarse_cuts(transfers_s: Sequence[float], stage_s: float) -> tuple[int, ...]:
    """The cuts inside the chain whose transfer takes no longer than a stage computes.

    This is BaPipe's coarse-grained partition. Layers whose boundary has more bytes than
    ``a_th = stage compute x bandwidth`` become one block, so no transfer is slower than a stage.
    ``transfers_s[cut]`` is the transfer at each cut, ends of the chain included.

    >>> coarse_cuts([0.0, 5.0, 1.0, 2.0, 0.0], stage_s=2.0)
    (2, 3)
    """
    return tuple(cut for cut in range(1, len(transfers_s) - 1) if transfers_s[cut] <= stage_s)


def tuned_to_chips(
    cuts: tuple[int, ...], busy_s: Callable[[int, int, int], float]
) -> tuple[int, ...]:
    """Cuts from which no border layer can move and leave a shorter bottleneck.

    A stage whose parameters exceed its chip reads them in every pass. So shares of the layers'
    times alone balance nothing there.

    >>> def read(stage, lo, hi):
    ...     return hi - lo + (10 if hi - lo > 3 else 0)
    >>> tuned_to_chips((0, 4, 6), read)
    (0, 3, 6)
    """
    while True:
        moves = [moved for stage in range(len(cuts) - 1) for _, moved in border_moves(cuts, stage)]
        best = min(moves, key=lambda moved: bottleneck(moved, busy_s), default=cuts)
        if not bottleneck(best, busy_s) < bottleneck(cuts, busy_s):
            return cuts
        cuts = best


def memory_fine_tuned(
    cuts: tuple[int, ...],
    memory_bytes: Sequence[float],
    needed_bytes: Callable[[int, int, int], float],
    busy_s: Callable[[int, int, int], float],
) -> tuple[int, ...]:
    """Cuts with which every stage fits, found by moving border layers; empty where none is found.

    The stage that exceeds its memory most gives its first or last layer to the neighbour with the
    most free memory. If both have as much, the move that leaves the shorter bottleneck is taken. No
    move returns to cuts seen before. The search ends after as many moves as layers times stages.
    ``needed_bytes(stage, lo, hi)`` and ``busy_s(stage, lo, hi)`` are those of a run of layers on a
    stage's accelerator.
    """
    seen = {cuts}
    for _ in range(cuts[-1] * len(memory_bytes) + 1):
        excess = [
            needed_bytes(s, lo, hi) - memory_bytes[s] for s, (lo, hi) in enumerate(pairwise(cuts))
        ]
        fullest = max(range(len(excess)), key=lambda s: excess[s])
        if excess[fullest] <= 0:
            return cuts
        moves = [
            (excess[neighbour], bottleneck(moved, busy_s), moved)
            for neighbour, moved in border_moves(cuts, fullest)
            if moved not in seen
        ]
        if not moves:
            return ()
        cuts = min(moves)[2]
        seen.add(cuts)
    return ()


def border_moves(cuts: tuple[int, ...], stage: int) -> list[tuple[int, tuple[int, ...]]]:
    """The neighbours of a stage, each with the cuts after it took over a border layer."""
    if cuts[stage + 1] - cuts[stage] < 2:
        return []
    moves: list[tuple[int, tuple[int, ...]]] = []
    if stage > 0:
        moves.append((stage - 1, (*cuts[:stage], cuts[stage] + 1, *cuts[stage + 1 :])))
    if stage + 2 < len(cuts):
        moves.append((stage + 1, (*cuts[: stage + 1], cuts[stage + 1] - 1, *cuts[stage + 2 :])))
    return moves


def bottleneck(cuts: tuple[int, ...], busy_s: Callable[[int, int, int], float]) -> float:
    return max(busy_s(s, lo, hi) for s, (lo, hi) in enumerate(pairwise(cuts)))
