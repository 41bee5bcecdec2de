"""Bytes that one replica of a stage needs.

    replica = parameters * versions + gradients + optimizer state + buffers   all the time
            + parameters in the autocast type                                 all the time
            + saved bytes of its slice, for every micro-batch in flight       F (or R) to B (or W)
            + workspace of its largest layer                                  while it computes
    device  = sum of its replicas at each moment

A stage that recomputes keeps only its inputs from F to R, and everything (including the inputs)
from R to B. If the backward directly follows its forward there is no R, and everything is kept at
once.

If only some layers are recomputed, the stage keeps from F to R what the other layers save, and each
tensor that passes between a recomputed layer and another one. That is too much by at most what the
other layers save of these tensors anyway.

A stage that recomputes by block keeps what its layers read, as if they saved that, and needs
what the largest layer saves beside it as workspace (`ModelProfile.by_block`).

What replicas divide is `penstock.costs.sharding.held_bytes`. Buffers of messages in transfer are
not counted. Without a flush several versions of the parameters are kept
(`penstock.schedule.weight_rule`), and each micro-batch keeps its own in the autocast type.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.costs.layer_sums import LayerSums
from penstock.costs.sharding import held_bytes, two_layers_bytes
from penstock.plan.plan import Stage
from penstock.profile.model_profile import first_of_each_tensor
from penstock.schedule.action import Action


@dataclass(frozen=True, slots=True, order=True)
class Held:
    """How many micro-batches a stage holds with everything saved, and how many with inputs only."""

    saved: int = 0
    inputs: int = 0

    def after_start(self, action: Action, recomputed: bool) -> "Held":
        """What is held while ``action`` runs: memory is allocated at its start."""
        match action.kind:
            case "F" if recomputed:
                return Held(self.saved, self.inputs + 1)
            case "F":
                return Held(self.saved + 1, self.inputs)
            case "R":
                return Held(self.saved + 1, self.inputs - 1)
            case "B" | "I" | "W":
                return self

    def after_end(self, action: Action) -> "Held":
        """What is held after ``action``: B or W frees a micro-batch."""
        match action.kind:
            case "B" | "W":
                return Held(self.saved - 1, self.inputs)
            case "F" | "R" | "I":
                return self


class StageMemory(NamedTuple):
    """Bytes of one replica of one stage."""

    fixed_bytes: float
    saved_bytes: float
    input_bytes: float
    workspace_bytes: float

    def at(self, held: Held) -> float:
        """Bytes while nothing runs."""
        return self.fixed_bytes + held.saved * self.saved_bytes + held.inputs * self.input_bytes


@dataclass(frozen=True, slots=True)
class Holding:
    """What each instance on a device holds while an action of instance ``running`` runs."""

    running: int
    held: tuple[Held, ...]


def most_bytes(memories: Sequence[StageMemory], holdings: Iterable[Holding]) -> float:
    """Peak bytes of a device with replicas of these memories, while an action runs."""
    if len(memories) == 1:
        memory = memories[0]
        most_bytes = max(memory.at(holding.held[0]) for holding in holdings)
        return most_bytes + memory.workspace_bytes
    return max(
        sum(memory.at(held) for memory, held in zip(memories, holding.held, strict=True))
        + memories[holding.running].workspace_bytes
        for holding in holdings
    )


def stage_memory(
    stage: Stage,
    rows: int,
    sums: LayerSums,
    optimizer_bytes_per_parameter_byte: float,
    versions: int = 1,
) -> StageMemory:
    """The bytes of a replica that computes ``rows`` rows of every micro-batch.

    A byte of parameters counts ``versions`` times, once for its gradient, and
    ``optimizer_bytes_per_parameter_byte`` times for optimizer state, but for what the replicas
    divide. Mirrored copies and tied stages could take a part as well; that is not counted. The
    inputs are the tensors received from other stages; the batch itself is on every rank anyway.
    """
    layers = stage.layers
    saved_bytes = sums.saved_bytes.of(layers, rows)
    inputs = first_of_each_tensor(
        edge for edge in sums.profile.crossing[layers.start] if edge.consumer in layers
    )
    state_bytes = held_bytes(
        stage.sharding,
        stage.replicas,
        float(sums.parameter_bytes(layers)),
        two_layers_bytes(sums.profile, layers) if stage.sharding else 0.0,
        versions + 1.0,
        optimizer_bytes_per_parameter_byte,
    )
    casts = float(sums.cast_bytes.of(layers))
    return StageMemory(
        fixed_bytes=state_bytes + sums.buffer_bytes.of(layers) + casts * (versions == 1),
        saved_bytes=saved_bytes + casts * (versions > 1),
        input_bytes=max(0.0, sum(edge.bytes.at(rows) for edge in inputs)),
        workspace_bytes=sums.workspace_bytes.of(layers, rows),
    )
