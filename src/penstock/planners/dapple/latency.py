"""DAPPLE's closed form for one iteration: warm-up, steady phase and ending phase around a pivot."""

from collections.abc import Sequence

__all__ = ["latency_s", "pivot_of"]


def pivot_of(
    forward_s: Sequence[float], backward_s: Sequence[float], stages: int, micro_batches: int
) -> int:
    """The stage with the fewest bubbles in the steady phase (DAPPLE, PPoPP 2021, planner).

    Stages are compared from the last to the first. A stage becomes the pivot if its own steady
    phase is longer than that of the pivot so far plus the round trip between the two. Transfers
    count as stages.

    >>> pivot_of([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], 3, micro_batches=8)
    2
    >>> pivot_of([2.0, 1.0, 1.0], [4.0, 2.0, 2.0], 3, micro_batches=8)
    0
    """
    steady = micro_batches - 1
    pivot = stages - 1
    between_s = 0.0
    for stage in range(stages - 2, -1, -1):
        own_s = forward_s[stage] + backward_s[stage]
        pivot_s = forward_s[pivot] + backward_s[pivot]
        if steady * own_s > steady * pivot_s + between_s:
            pivot, between_s = stage, 0.0
        else:
            between_s += own_s
    return pivot


def latency_s(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    tail_s: Sequence[float],
    stages: int,
    micro_batches: int,
) -> float:
    """Seconds of one iteration of a pipeline whose transfers are stages of their own.

        L   = T_w + T_g + T_s + T_e               Q: the pivot of `pivot_of`
        T_w = sum over s <= Q of F_s              until the first micro-batch has passed the pivot
        T_g = max(0, sum over s > Q of (F_s + B_s) - (min(S - Q, M) - 1) F_Q)
        T_s = (M - 1) (F_Q + B_Q)                 the pivot works without a gap
        T_e = max over s of (A_s + E_s)           last backwards, then all-reduce and step
        E_s = sum over a = s..Q of B_a            for s <= Q
        E_s = - sum over a = Q+1..s-1 of B_a      for s > Q

    ``E_s`` is the time from the start of the pivot's last backward to the end of that of stage
    ``s``. This form agrees with the authors' slides: the all-reduce of a late stage is hidden in
    the drain of the stages before it. ``T_g`` is the slides' longer form: how long the pivot waits
    for the first backward beyond its own warm-up forwards. Without it, a plan of few micro-batches
    seems to cost little more than its first stages. The latency is neither a lower nor an upper
    bound of the iteration time.

    Source: DAPPLE (PPoPP 2021), pipeline latency of the planner; slides of its released planner.

    >>> latency_s([1.0, 0.5, 1.0], [2.0, 0.5, 2.0], [0.0, 0.0, 4.0], 3, micro_batches=4)
    17.5
    """
    pivot = pivot_of(forward_s, backward_s, stages, micro_batches)
    warm_up_s = 0.0
    for stage in range(pivot + 1):
        warm_up_s += forward_s[stage]
    ended_s = 0.0
    ending_s = 0.0
    for stage in range(pivot, -1, -1):
        ended_s += backward_s[stage]
        ending_s = max(ending_s, ended_s + tail_s[stage])
    started_s = 0.0
    round_trip_s = 0.0
    for stage in range(pivot + 1, stages):
        ending_s = max(ending_s, tail_s[stage] - started_s)
        started_s += backward_s[stage]
        round_trip_s += forward_s[stage] + backward_s[stage]
    ahead = min(stages - pivot, micro_batches) - 1
    gap_s = max(0.0, round_trip_s - ahead * forward_s[pivot])
    steady_s = (micro_batches - 1) * (forward_s[pivot] + backward_s[pivot])
    return warm_up_s + gap_s + steady_s + ending_s
