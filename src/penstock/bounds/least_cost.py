"""The least seconds and bytes of rows, whatever their micro-batches, and the speed of a host."""

from penstock.cluster.cluster import Host
from penstock.profile.model_profile import Affine

__all__ = ["floor_of", "host_speeds", "least_per_sample"]


def floor_of(cost: Affine, most_rows: int) -> Affine:
    """A cost without negative terms that for 1 to ``most_rows`` rows is not above ``cost``.

    Fitted costs may have a negative term: ``-1 + 3 n`` is at least ``2 n``, and ``9 - n`` is at
    least its value for the most rows.

    >>> floor_of(Affine(-1.0, 3.0), 8)
    Affine(fixed=0.0, per_sample=2.0)
    """
    if cost.fixed < 0:
        return Affine(0.0, max(0.0, cost.at(1)))
    if cost.per_sample < 0:
        return Affine(max(0.0, cost.at(most_rows)), 0.0)
    return cost


def least_per_sample(cost: Affine, most_samples: int) -> float:
    """The least cost of a sample in slices of 1 to ``most_samples``; an affine one is extreme
    there."""
    return max(0.0, min(cost.at(1), cost.at(most_samples) / most_samples))


def host_speeds(host: Host) -> list[float]:
    """Speeds of the devices of a host that can compute at full speed at once, fastest first."""
    speeds = sorted((device.speed for device in host.devices), reverse=True)
    return speeds[: host.full_speed_devices or len(speeds)]
