"""DAPPLE's closed form for one iteration: warm-up, steady phase and ending phase around a pivot."""

from collections.abc import Sequence

from penstock.core.native import dapple_latency_s, dapple_pivot


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
    return dapple_pivot(forward_s[:stages], backward_s[:stages], micro_batches)


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
    parts = (forward_s[:stages], backward_s[:stages], tail_s[:stages])
    return dapple_latency_s(*parts, micro_batches)
