"""How slowly a rehearsal runs, and how small its tensors are, if the user does not say."""

from penstock.simulate.workload import Workload

__all__ = ["chosen_byte_scale", "chosen_time_scale"]

EACH_S = 0.015
"""Seconds of a core for each action and each message, of which this machine works a small part."""

SHORTEST_S = 2.0
"""An iteration takes at least this long here, so that single late wake-ups do not count."""

LONGEST_S = 12.0
"""And no longer than this: nobody waits for minutes to see a plan."""

MOST_BYTES = 8 << 20
"""The bytes of an iteration's messages together. Copies of 64 MiB took 1 to 2 % of an iteration."""


def chosen_time_scale(workload: Workload, iteration_s: float, cores: int) -> float:
    """How many seconds one second of the plan takes, at least 1.

    The host's work for an action must be small beside the time in which it happens.
    """
    messages = len(workload.messages) * workload.micro_batches
    wanted_s = (workload.actions + messages) * EACH_S / cores
    least_s = min(LONGEST_S, max(SHORTEST_S, wanted_s))
    return max(1.0, least_s / iteration_s) if iteration_s > 0 else 1.0


def chosen_byte_scale(workload: Workload) -> float:
    """The share of the planned bytes that tensors have, at most 1."""
    sent = sum(message.bytes for message in workload.messages) * workload.micro_batches
    summed = sum(bucket.bytes for r in workload.reductions for bucket in r.buckets)
    return min(1.0, MOST_BYTES / max(1.0, sent + summed))
