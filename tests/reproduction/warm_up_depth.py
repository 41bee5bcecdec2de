"""What deeper warm-up gains (DAPPLE, PPoPP 2021: policy P_B over P_A), by communication.

Equal stages, backwards twice as long as forwards, 32 micro-batches. ACR is the time of a message
down and one up over a boundary, over forward and backward of a stage. `GAINS` was computed apart
from this project, for links of their own at each boundary, and rounded to two places.
"""

from reproduction.balanced_stages import play_balanced
from reproduction.own_links import seconds_with_own_links

MICRO_BATCHES = 32
FORWARD_S, BACKWARD_S = 1.0, 2.0
P_A, P_B = "1f1b", "early-backward"

ACRS = (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.0, 4.0)
GAINS = {
    2: (1.00, 1.02, 1.05, 1.11, 1.22, 1.33, 1.44, 1.44, 1.44),
    4: (1.00, 1.03, 1.07, 1.16, 1.32, 1.46, 1.61, 1.61, 1.62),
    8: (1.00, 1.03, 1.07, 1.17, 1.32, 1.46, 1.59, 1.60, 1.59),
    16: (1.00, 1.03, 1.06, 1.14, 1.27, 1.37, 1.47, 1.47, 1.47),
}


def transfer_s(acr: float) -> float:
    """Seconds of one message over a boundary."""
    return acr * (FORWARD_S + BACKWARD_S) / 2


def own_links_gain(stages: int, acr: float) -> float:
    """Seconds by P_A over seconds by P_B where each boundary has links of its own."""
    costs = (MICRO_BATCHES, FORWARD_S, BACKWARD_S, transfer_s(acr))
    return seconds_with_own_links(P_A, stages, *costs) / seconds_with_own_links(P_B, stages, *costs)


def simulated_gain(stages: int, acr: float, *, separate_links: bool = False) -> float:
    """The same on a cluster, whose devices have one engine to send and one to receive.

    With ``separate_links`` every pair of devices has a link of its own instead.
    """
    seconds = [
        play_balanced(
            name,
            stages,
            MICRO_BATCHES,
            forward_s=FORWARD_S,
            backward_s=BACKWARD_S,
            transfer_s=transfer_s(acr),
            separate_links=separate_links,
        ).iteration_s
        for name in (P_A, P_B)
    ]
    return seconds[0] / seconds[1]
