"""BaPipe's four closed forms (arXiv 2012.12544) and what the simulator plays, on equal stages.

``M`` micro-batches, ``N`` stages, ``F`` and ``B`` seconds of a stage, ``SR`` seconds of a message
over a boundary:

    1F1B-AS, FBP-AS   (M + N - 1) (F + B)
    1F1B-SNO          (M + N - 1) (F + B)  +  2 (N + M - 2) SR
    1F1B-SO           (M + N - 1) (F + B)  +  2 (N - 1) SR

AS is for accelerators that stream activations while they compute: a message passes beside the pass
that makes it. On SNO's a device computes nothing while it sends or receives.
"""

from reproduction.balanced_stages import play_balanced

from penstock.planners.bapipe.formulas import Method, mini_batch_s

METHODS: tuple[Method, ...] = ("1f1b-as", "fbp-as", "1f1b-sno", "1f1b-so")


def closed_form_s(
    method: Method, stages: int, micro_batches: int, busy_s: float, transfer_s: float
) -> float:
    """What BaPipe gives."""
    return mini_batch_s(
        method,
        micro_batches=micro_batches,
        stages=stages,
        busy_s=busy_s,
        transfer_s=transfer_s,
    )


def played_s(
    method: Method,
    stages: int,
    micro_batches: int,
    forward_s: float,
    backward_s: float,
    transfer_s: float,
    *,
    separate_links: bool = False,
    half_duplex: bool = False,
) -> float:
    """What the simulator plays, on the accelerators that the method is for."""
    return play_balanced(
        method,
        stages,
        micro_batches,
        forward_s=forward_s,
        backward_s=backward_s,
        transfer_s=transfer_s,
        overlaps_communication=method != "1f1b-sno",
        streams=method.endswith("as"),
        separate_links=separate_links,
        half_duplex=half_duplex,
    ).iteration_s
