"""Equal stages on equal devices, which the papers' closed forms are about."""

from collections.abc import Callable
from typing import ParamSpec

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.plan.plan import Plan, Stage
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.simulate.simulation import Prediction, simulate_plan

LINK_BYTES_PER_S = 1e9
Inputs = ParamSpec("Inputs")


def balanced_stages(
    schedule: str,
    stages: int,
    micro_batches: int,
    *,
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    transfer_s: float = 0.0,
    overlaps_communication: bool = True,
    streams: bool = False,
    separate_links: bool = False,
    half_duplex: bool = False,
) -> tuple[Plan, ModelProfile, Cluster]:
    """A schedule on ``stages`` devices; a message over one boundary takes ``transfer_s``."""
    layer = LayerCost(
        "layer",
        Affine(forward_s),
        Affine(backward_s / 2),
        Affine(backward_s / 2),
        saved_bytes=Affine(1.0),
    )
    size = Affine(transfer_s * LINK_BYTES_PER_S)
    edges = tuple(Edge(i, i + 1, f"tensor{i}", size, size) for i in range(stages - 1))
    device = Device(
        "device",
        1e15,
        overlaps_communication=overlaps_communication,
        concurrent_passes=streams,
    )
    host = Host(
        "host",
        (device,) * stages,
        LINK_BYTES_PER_S,
        half_duplex=half_duplex,
        separate_links=separate_links,
    )
    cluster = Cluster("one host", (host,))
    plan = Plan(
        tuple(Stage(range(i, i + 1), (i,), (1,)) for i in range(stages)),
        micro_batches,
        1,
        schedule,
    )
    return plan, ModelProfile("balanced", (layer,) * stages, edges), cluster


def simulated(
    make: Callable[Inputs, tuple[Plan, ModelProfile, Cluster]],
) -> Callable[Inputs, Prediction]:
    """A function that simulates what ``make`` gives."""

    def play(*args: Inputs.args, **kwargs: Inputs.kwargs) -> Prediction:
        return simulate_plan(*make(*args, **kwargs))

    return play


play_balanced = simulated(balanced_stages)
"""Plays `balanced_stages`."""
