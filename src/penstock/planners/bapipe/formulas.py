"""BaPipe's four schedules in closed form: time, features kept, bandwidth."""

from typing import Literal, TypeAlias

Method: TypeAlias = Literal["1f1b-as", "fbp-as", "1f1b-sno", "1f1b-so"]
"""AS is for accelerators that transfer while they compute, such as FPGAs; S is for others, such as
GPUs. NO: transfers are not overlapped with computing; O: they are."""

METHODS: tuple[Method, ...] = ("1f1b-as", "fbp-as", "1f1b-sno", "1f1b-so")
"""BaPipe's own schedules, by the names of their families here."""


def method_of(schedule: str, *, asynchronous: bool) -> Method:
    """The method whose closed form is used for a schedule: its own, or the most similar one.

    >>> method_of("fbp-as", asynchronous=True), method_of("early-backward", asynchronous=False)
    ('fbp-as', '1f1b-so')
    """
    for method in METHODS:
        if schedule == method:
            return method
    deep = schedule in ("early-backward", "wavefront")
    if asynchronous:
        return "fbp-as" if deep else "1f1b-as"
    return "1f1b-so" if deep else "1f1b-sno"


def mini_batch_s(
    method: Method, *, micro_batches: int, stages: int, busy_s: float, transfer_s: float
) -> float:
    """Seconds of a mini-batch on balanced stages (BaPipe, arXiv 2012.12544, table of schedules).

        1F1B-AS, FBP-AS   (M + N - 1) (F + B)
        1F1B-SNO          (M + N - 1) (F + B)  +  2 (N + M - 2) SR
        1F1B-SO           (M + N - 1) (F + B)  +  2 (N - 1) SR

    ``busy_s`` is ``F + B`` of a stage for one micro-batch. ``transfer_s`` (``SR``) is the time of
    one boundary's activations, in one direction. The form is exact for equal stages. Unequal stages
    all count as the slowest.

    >>> mini_batch_s("1f1b-so", micro_batches=8, stages=2, busy_s=3.0, transfer_s=0.5)
    28.0
    """
    computing_s = (micro_batches + stages - 1) * busy_s
    match method:
        case "1f1b-as" | "fbp-as":
            return computing_s
        case "1f1b-sno":
            if stages == 1:
                return computing_s
            return computing_s + 2 * (stages + micro_batches - 2) * transfer_s
        case "1f1b-so":
            return computing_s + 2 * (stages - 1) * transfer_s


def pace_s(method: Method, *, forward_s: float, backward_s: float, transfer_s: float) -> float:
    """Seconds between micro-batches of a stage whose link may be slower than its computing.

    1F1B-AS hides one transfer behind each forward and each backward. FBP-AS hides two behind both
    together, so it is better where the bandwidth is less than ``a / F``. On GPUs the link sets the
    pace if one transfer takes longer than forward and backward together.

    >>> wide = {"forward_s": 1.0, "backward_s": 2.0, "transfer_s": 1.5}
    >>> pace_s("1f1b-as", **wide), pace_s("fbp-as", **wide)
    (3.5, 3.0)
    """
    match method:
        case "1f1b-as":
            return max(forward_s, transfer_s) + max(backward_s, transfer_s)
        case "fbp-as":
            return max(forward_s + backward_s, 2 * transfer_s)
        case "1f1b-sno" | "1f1b-so":
            return max(forward_s + backward_s, transfer_s)


def features_kept(method: Method, *, stage: int, stages: int) -> int:
    """The number of micro-batches whose features stage ``stage`` (from 0) of ``stages`` keeps.

    The paper has ``N - i + 1`` for stage ``i`` from 1. FBP-AS and 1F1B-SO keep twice as many,
    because their warm-up is twice as deep.

    >>> features_kept("1f1b-so", stage=0, stages=4)
    8
    """
    behind = stages - stage
    return behind if method in ("1f1b-as", "1f1b-sno") else 2 * behind
