"""How long messages keep the engines of a relaxed stage's replicas busy, at least."""

from penstock.plan.run_tables import Floats

__all__ = ["left_over_s", "one_way_s", "received_s", "sending_s", "traffic_s", "two_links_s"]


def traffic_s(
    bytes_: Floats, rows: float, latency_s: float, best_rate: float, rate: float
) -> float:
    """Mean seconds that messages of a micro-batch keep a replica's engine busy.

    ``bytes_``: fixed bytes, bytes per sample, messages that each replica has; ``rate`` is what all
    replicas reach together.
    """
    return latency_s * bytes_[2] + bytes_[0] / best_rate + bytes_[1] * rows / rate


def left_over_s(
    all_: Floats, part: Floats, rows: float, latency_s: float, best_rate: float, rate: float
) -> float:
    """`traffic_s` of all messages but a part of them."""
    all_s = traffic_s(all_, rows, latency_s, best_rate, rate)
    return all_s - traffic_s(part, rows, latency_s, best_rate, rate)


def two_links_s(
    one: Floats, other: Floats, rows: float, latency_s: float, best_rate: float, second_rate: float
) -> float:
    """Least seconds of messages into one device, or out of it, over two different links."""
    fast_s = traffic_s(one, rows, latency_s, best_rate, best_rate)
    fast_s += traffic_s(other, rows, latency_s, second_rate, second_rate)
    slow_s = traffic_s(one, rows, latency_s, second_rate, second_rate)
    slow_s += traffic_s(other, rows, latency_s, best_rate, best_rate)
    return min(fast_s, slow_s)


def received_s(
    down: Floats, up: Floats, near: Floats, is_read: bool, figures: Floats, question: Floats
) -> tuple[float, float, float, float]:
    """Mean seconds in which a micro-batch's messages come in.

    All of them, and gradients with the activations of the stage before (``near``, if the stage
    reads from it); both of the mean replica and then of the fullest.
    """
    rows, latency_s, most_rows = question[1], question[2], figures[3]
    best, second, rate = figures[9], figures[11], figures[5]
    up_s = traffic_s(up, rows, latency_s, best, rate)
    in_s = up_s + traffic_s(down, rows, latency_s, best, rate)
    full_up_s = traffic_s(up, most_rows, latency_s, best, best)
    full_in_s = full_up_s + traffic_s(down, most_rows, latency_s, best, best)
    # One device takes activations and gradients in from different devices.
    two_links = figures[8] == 1 and second < best
    if two_links:
        in_s = two_links_s(up, down, rows, latency_s, best, second)
    near_s, full_near_s = up_s, full_up_s
    if is_read:
        near_s += traffic_s(near, rows, latency_s, best, rate)
        full_near_s += traffic_s(near, most_rows, latency_s, best, best)
        if two_links:
            near_s = two_links_s(up, near, rows, latency_s, best, second)
    return in_s, near_s, full_in_s, full_near_s


def sending_s(
    all_out: Floats, out: Floats, near: Floats, is_read: bool, figures: Floats, question: Floats
) -> tuple[float, float, float]:
    """Mean seconds in which a micro-batch's messages go out.

    Activations with the gradients to the stage before (``near``, if the stage reads from it), all
    messages, and all of the fullest replica.
    """
    rows, latency_s = question[1], question[2]
    best, second, rate = figures[10], figures[12], figures[6]
    two_links = figures[8] == 1 and second < best
    out_s = traffic_s(out, rows, latency_s, best, rate)
    if is_read:
        out_s += traffic_s(near, rows, latency_s, best, rate)
        if two_links:
            out_s = two_links_s(out, near, rows, latency_s, best, second)
    all_out_s = traffic_s(all_out, rows, latency_s, best, rate)
    if two_links:
        all_out_s = two_links_s(out, all_out - out, rows, latency_s, best, second)
    return out_s, all_out_s, traffic_s(all_out, figures[3], latency_s, best, best)


def one_way_s(
    traffic: Floats, figures: Floats, question: Floats
) -> tuple[float, float, float, float, float]:
    """Seconds of what comes in and goes out in one direction, for all micro-batches.

    Activations in on the busiest replica at least; gradients in of the mean replica and of the
    fullest; activations out of the two. Each as if nothing else used the engine. ``traffic``:
    activations in, gradients in, all out and activations out of a run of layers.
    """
    batches, rows, latency_s, full = question[0], question[1], question[2], figures[3]
    receive, receive_all, send, send_all = figures[9], figures[5], figures[10], figures[6]
    in_s = traffic_s(traffic[0], rows, latency_s, receive, receive_all)
    in_s = max(in_s, traffic_s(traffic[0], full, latency_s, receive, receive))
    return (
        batches * in_s,
        batches * traffic_s(traffic[1], rows, latency_s, receive, receive_all),
        batches * traffic_s(traffic[1], full, latency_s, receive, receive),
        batches * traffic_s(traffic[3], rows, latency_s, send, send_all),
        batches * traffic_s(traffic[3], full, latency_s, send, send),
    )
