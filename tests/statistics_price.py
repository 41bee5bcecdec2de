"""What a micro-batch costs a stage's replicas, written from what they read and exchange."""

from penstock.cluster.collectives import all_reduce_s
from penstock.costs.tables import crowding
from penstock.plan.plan import Stage
from penstock.plan.problem import PlanningProblem

NUMBER_BYTES = 4


def waits_for_statistics_s(problem: PlanningProblem, stage: Stage, forwards: int) -> float:
    """Seconds of so many forwards and one backward of a micro-batch.

    A forward sums a table with a row for each replica: the mean and the variance of every channel,
    and a count. A backward sums two numbers for each channel.
    """
    replicas = len(stage.devices)
    layers = problem.profile.layers[stage.layers.start : stage.layers.stop]
    norms = sum(layer.norms for layer in layers)
    if replicas < 2 or not norms:
        return 0.0
    numbers = 2 * sum(layer.norm_channels for layer in layers) / norms
    operators_s = problem.profile.statistics_s
    there, back = (
        norms * (operators_s + all_reduce_s(problem.cluster, stage.devices, size_bytes))
        for size_bytes in (replicas * (numbers + 1) * NUMBER_BYTES, numbers * NUMBER_BYTES)
    )
    return forwards * there + back


def slowest_replica_s(problem: PlanningProblem, stage: Stage, *, forwards: int) -> float:
    """Forwards and backward of one micro-batch on the replica that takes longest.

    Each pass takes at least as long as reading the parameters, where a chip does not hold them.
    """
    profile, cluster = problem.profile, problem.cluster
    held_bytes = profile.parameter_bytes(stage.layers)
    passes: list[list[float]] = []
    reads_s: list[float] = []
    for number, rows in zip(stage.devices, stage.slices, strict=True):
        device = cluster.devices[number]
        forward_s = profile.forward_s(stage.layers, rows) / device.speed
        backward_s = profile.backward_s(stage.layers, rows) / device.speed
        passes.append([*[forward_s] * forwards, backward_s])
        rate = device.off_chip_bytes_per_s
        reads_s.append(held_bytes / rate if rate and held_bytes > device.on_chip_bytes else 0.0)
    longest_s = max(map(sum, passes))
    if any(reads_s):
        longest_s = sum(max(*reads_s, *times) for times in zip(*passes, strict=True))
    waits_s = waits_for_statistics_s(problem, stage, forwards)
    return crowding(cluster, stage.devices) * (longest_s + waits_s)
