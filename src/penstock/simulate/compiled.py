"""Plays a workload by the compiled engine: `penstock.simulate.event_loop` on flat arrays."""

from penstock.simulate.arrays import Arrays, arrays_of
from penstock.simulate.layout import ACTION_SPAN, ITEM_SPAN, STEP_SPAN
from penstock.simulate.orders import FlatOrders, flat_orders
from penstock.simulate.trace import Span, Trace
from penstock.simulate.workload import Parts, Workload

__all__ = ["iteration_s", "play"]


def iteration_s(parts: Parts, orders: FlatOrders) -> float:
    """Seconds of one iteration, without making a trace."""
    from penstock.simulate.event_loop import run

    arrays = arrays_of(parts, orders)
    return run(arrays.whole, arrays.real)


def play(workload: Workload) -> Trace:
    """Play one iteration; equal to `penstock.simulate.plain.play`."""
    from penstock.simulate.event_loop import run

    arrays = arrays_of(workload.parts, flat_orders(workload.schedule), record=True)
    end_s = run(arrays.whole, arrays.real)
    buckets = sum(len(group.buckets) for group in workload.reductions)
    messages = len(workload.messages) * workload.micro_batches
    items = spans(arrays, ITEM_SPAN, messages + buckets)
    return Trace(
        actions=spans(arrays, ACTION_SPAN, workload.actions),
        messages=items[:messages],
        buckets=items[messages:],
        steps=spans(arrays, STEP_SPAN, len(workload.devices)),
        iteration_s=end_s,
    )


def spans(arrays: Arrays, field: int, count: int) -> tuple[Span, ...]:
    """``count`` pairs of start and end."""
    first = arrays.whole[field]
    pairs = arrays.real[first : first + 2 * count].reshape(-1, 2).tolist()
    return tuple((start, end) for start, end in pairs)
