"""Least seconds of messages between neighbouring stages of a relaxed plan."""

import numpy as np

from penstock.plan.run_tables import Floats

__all__ = ["first_row_s", "message_s", "messages_at", "overlap_rows", "there_and_back_s"]


def message_s(size: Floats, rows: float, latency_s: float, s_per_byte: float) -> float:
    """Seconds of one message."""
    return size[2] * latency_s + (size[0] + size[1] * rows) * s_per_byte


def overlap_rows(rows: float, senders: int, receivers: int) -> float:
    """Mean over rows of the rows that are sent until one has left, between so many replicas.

    Contiguous slices make at most ``senders + receivers - 1`` messages. A sender's leave one after
    the other, so its ``n`` rows to ``k`` receivers take at least ``n * (1 + 1 / k) / 2`` on the
    mean, which is least in all where the senders have as many rows and receivers each.
    """
    return max(1.0, (rows / senders + rows / (senders + receivers - 1)) / 2)


def there_and_back_s(
    near: Floats, cut: int, down_rows: float, up_rows: float, latency_s: float, pairs: Floats
) -> float:
    """Least seconds of a message down and its gradient up, between one pair of devices."""
    least_s = np.inf
    for k in range(pairs.shape[0]):
        down_s = message_s(near[0, cut], down_rows, latency_s, pairs[k, 0])
        least_s = min(least_s, down_s + message_s(near[1, cut], up_rows, latency_s, pairs[k, 1]))
    return least_s


def first_row_s(
    near: Floats,
    cut: int,
    senders: int,
    receivers: int,
    fewest: float,
    rows: float,
    latency_s: float,
    s_per_byte: float,
    pairs: Floats,
) -> tuple[float, float]:
    """Least seconds until any replica can go on: of a message down, and of one down and one up.

    A replica needs all its rows, ``fewest`` at least, which come in one after the other.
    """
    down_rows = rows if receivers == 1 else fewest
    up_rows = rows if senders == 1 else 1.0
    down_s = message_s(near[0, cut], down_rows, latency_s, s_per_byte)
    up_s = message_s(near[1, cut], up_rows, latency_s, s_per_byte)
    least = rows if senders == receivers == 1 else 1.0
    both_s = there_and_back_s(near, cut, least, least, latency_s, pairs)
    return down_s, max(down_s + up_s, both_s)


def messages_at(
    near: Floats,
    cut: int,
    senders: int,
    receivers: int,
    rows: float,
    crossing: int,
    latency_s: float,
    s_per_byte: float,
    pairs: Floats,
) -> tuple[float, float, float, float]:
    """Least seconds of a row's message down, up and both ways.

    And of all rows through a port if crossing.
    """
    down_rows = overlap_rows(rows, senders, receivers)
    up_rows = overlap_rows(rows, receivers, senders)
    down_s = message_s(near[0, cut], down_rows, latency_s, s_per_byte)
    up_s = message_s(near[1, cut], up_rows, latency_s, s_per_byte)
    if crossing:
        port_s = message_s(near[0, cut], rows, latency_s, s_per_byte)
        return down_s, up_s, down_s + up_s, port_s
    both_s = there_and_back_s(near, cut, down_rows, up_rows, latency_s, pairs)
    return down_s, up_s, max(down_s + up_s, both_s), 0.0
