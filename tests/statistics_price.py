"""What replicas wait for batch normalisation's statistics, written from what they exchange."""

from penstock.cluster.collectives import all_reduce_s
from penstock.plan.plan import Stage
from penstock.plan.problem import PlanningProblem

NUMBER_BYTES = 4
SMALL_OPERATORS_S = 1e-4


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
    there, back = (
        norms * (SMALL_OPERATORS_S + all_reduce_s(problem.cluster, stage.devices, size_bytes))
        for size_bytes in (replicas * (numbers + 1) * NUMBER_BYTES, numbers * NUMBER_BYTES)
    )
    return forwards * there + back
