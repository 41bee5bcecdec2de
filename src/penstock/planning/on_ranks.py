"""A prediction for tensor groups as one for their ranks, to compare with what ranks measure."""

from collections.abc import Iterator
from dataclasses import replace

from penstock.plan.plan import Plan, rank_pairs
from penstock.simulate.simulation import Prediction
from penstock.timeline.timeline import Event, MemorySample, Timeline

__all__ = ["on_ranks"]


def on_ranks(prediction: Prediction, plan: Plan, ranks: int) -> Prediction:
    """``prediction``, whose devices are the tensor groups of ``plan``, for each of ``ranks`` ranks.

    Every rank of a group does what the group does, at the same time, and needs the memory that is
    predicted for the group. A message from group to group becomes one for each receiving rank. A
    plan without tensor groups has its prediction already.
    """
    if not plan.tensor_groups:
        return prediction
    whole = prediction.timeline
    of_device = dict(enumerate(plan.tensor_groups))
    events = sorted(
        (own for event in whole.events for own in copies(event, plan)),
        key=lambda event: (event.start_s, event.device, event.end_s),
    )
    memory = tuple(
        MemorySample(rank, sample.time_s, sample.bytes)
        for sample in whole.memory
        for rank in of_device[sample.device]
    )
    peaks = [0.0] * ranks
    for device, group in of_device.items():
        for rank in group:
            peaks[rank] = prediction.peak_memory_bytes[device]
    return replace(
        prediction,
        timeline=Timeline(tuple(events), ranks, memory, whole.title),
        peak_memory_bytes=tuple(peaks),
        too_full=tuple(rank for device in prediction.too_full for rank in of_device[device]),
    )


def copies(event: Event, plan: Plan) -> Iterator[Event]:
    """An event of a device on each of its ranks."""
    own = plan.tensor_groups[event.device]
    if event.peer < 0:
        for rank in own:
            yield replace(event, device=rank)
        return
    others = plan.tensor_groups[event.peer]
    if event.kind == "SEND":
        for sender, receiver in rank_pairs(own, others):
            yield replace(event, device=sender, peer=receiver)
    else:
        for sender, receiver in rank_pairs(others, own):
            yield replace(event, device=receiver, peer=sender)
