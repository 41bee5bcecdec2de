"""A straight pipeline in which every boundary has a link of its own each way, played plainly.

A link carries one message after the other. So it is in the simulator on hosts with separate links;
elsewhere devices have one engine to send and one to receive, which messages up and down share.
"""

from penstock.schedule.registry import FAMILIES
from penstock.schedule.shape import PipelineShape


def seconds_with_own_links(
    schedule: str,
    stages: int,
    micro_batches: int,
    forward_s: float,
    backward_s: float,
    transfer_s: float,
) -> float:
    """Seconds of an iteration of equal stages; ``transfer_s`` is one message over one link."""
    orders = FAMILIES[schedule].make(PipelineShape(stages, micro_batches)).orders
    done = [0] * stages
    free_s = [0.0] * stages
    link_free_s: dict[tuple[int, int], float] = {}
    ready_s = {("F", 0, m): 0.0 for m in range(micro_batches)}
    for _ in range(2 * stages * micro_batches):
        start_s, stage = min(
            (max(free_s[s], ready_s[action.kind, s, action.micro_batch]), s)
            for s in range(stages)
            if done[s] < len(orders[s])
            for action in [orders[s][done[s]]]
            if (action.kind, s, action.micro_batch) in ready_s
        )
        action = orders[stage][done[stage]]
        kind, m = action.kind, action.micro_batch
        end_s = start_s + (forward_s if kind == "F" else backward_s)
        free_s[stage], done[stage] = end_s, done[stage] + 1
        if kind == "F" and stage == stages - 1:
            ready_s["B", stage, m] = end_s
            continue
        target = stage + 1 if kind == "F" else stage - 1
        if target >= 0:
            way = (stage, target)
            link_free_s[way] = max(end_s, link_free_s.get(way, 0.0)) + transfer_s
            ready_s[kind, target, m] = link_free_s[way]
    return max(free_s)
