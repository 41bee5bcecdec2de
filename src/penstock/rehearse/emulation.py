"""What a rehearsal carries out: a plan on a cluster, at a scale of time and of bytes."""

from dataclasses import dataclass

from penstock.cluster.cluster import Cluster
from penstock.plan.plan import Plan
from penstock.profile.model_profile import Edge, ModelProfile
from penstock.runtime.transport.channels import TransportChoice

__all__ = ["Crossing", "Emulation", "crossings_of"]


@dataclass(frozen=True)
class Emulation:
    """A plan, what it is for, and how it is carried out.

    Every second of the plan takes ``time_scale`` seconds here. Tensors have ``byte_scale`` times
    the planned bytes; links and sums take the time of the planned ones. In iteration
    ``killed_in_iteration`` the rank ``killed_rank`` is killed (-1: none).
    """

    plan: Plan
    profile: ModelProfile
    cluster: Cluster
    time_scale: float
    byte_scale: float
    iterations: int
    transport: TransportChoice = "auto"
    killed_rank: int = -1
    killed_in_iteration: int = 0

    @property
    def ranks(self) -> int:
        """One process for each device up to the last that the plan uses."""
        return max(self.plan.devices) + 1


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor that one stage makes and another reads; ``name`` is unique in the model."""

    producer: int
    consumer: int
    name: str
    edge: Edge


def crossings_of(plan: Plan, profile: ModelProfile) -> tuple[Crossing, ...]:
    """Each tensor that crosses between stages, once for every stage that reads it."""
    found: dict[tuple[int, int, str], Crossing] = {}
    stage_of = [s for s, stage in enumerate(plan.stages) for _ in stage.layers]
    for edge in profile.edges:
        ends = stage_of[edge.producer], stage_of[edge.consumer]
        name = f"{edge.producer}.{edge.tensor}"
        if ends[0] != ends[1] and max(edge.bytes.at(1), edge.gradient_bytes.at(1)) > 0:
            found.setdefault((*ends, name), Crossing(*ends, name, edge))
    return tuple(found[key] for key in sorted(found))
