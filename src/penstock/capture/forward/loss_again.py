"""The calls of the loss that no module follows, which can run once more on a whole step.

    last stage, by micro-batch   modules --- ends ---> loss, weighed by micro-batch
    once for the step                        joined -> the user's lines as they are

They read the ends, and leaves of the batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from penstock.capture.forward.partial_forward import ProgramPart, RunContext
from penstock.capture.forward.stage_module import StageModule
from penstock.capture.layer_graph import LayerGraph
from penstock.capture.loss.loss_parts import LossParts
from penstock.capture.record.calls import Address
from penstock.capture.record.user_lines import line_in_words
from penstock.errors import BadInput

Ends: TypeAlias = tuple[Mapping[int, torch.Tensor], Mapping[int, torch.Tensor]]
"""Leaves of the batch by number, and values that the loss reads, of one micro-batch."""


@dataclass(frozen=True)
class LossAgain:
    """Values to be kept of a micro-batch: ``ends``, each with the address of its maker and slot.

    The stage begins at event ``start``. ``why``: they cannot run by themselves, because of this.
    """

    start: int
    ends: Mapping[int, tuple[Address, Any]]
    why: str

    def within(self, part: ProgramPart) -> ProgramPart:
        """The part of the last stage that also sends the ends that it makes itself, and runs on."""
        own = {value: made for value, made in self.ends.items() if value not in part.received}
        return replace(part, sent={**part.sent, **own}, to_end=True)

    def loss(self, graph: LayerGraph, module: StageModule, kept: Sequence[Ends]) -> torch.Tensor:
        """The loss of micro-batches together, by the user's lines; ``module`` is their stage."""
        held = module.stage.held.names
        plain = replace(graph, recorded=replace(graph.recorded, parts=LossParts()), wants="loss")
        part = ProgramPart(self.start, graph.cut.end, held=held, received=dict(self.ends))
        inputs, specs = tuple(kept[0][0]), tuple(map(graph.cut.spec, self.ends))
        options: Any = {"foreign": (), "is_last": True, "has_loss": True, "outputs": ()}
        again = StageModule(plain, part, inputs, specs, **options)
        again.unchecked = False
        again.stage.state.key = module.stage.state.key  # it begins with what that has left
        again.set_context(RunContext(trial=True))
        leaves = [torch.cat([leaves[number] for leaves, _ in kept]) for number in inputs]
        shared = graph.layout.shared
        common = [[own[n][0] for own, _ in kept] for n in inputs if n in shared]
        received: list[torch.Tensor] = []
        for value, spec in zip(self.ends, specs, strict=True):
            every = [own[value] for _, own in kept]
            if spec.batch_dim < 0:
                common.append(every)
            received.append(torch.cat(every, spec.batch_dim) if spec.batch_dim >= 0 else every[0])
        if not all(torch.equal(one, every[0]) for every in common for one in every):
            raise BadInput("batches of a step have other values of what all their samples share")
        with torch.no_grad():
            return again.run(leaves, received)[0]


def loss_again(graph: LayerGraph, first: int) -> LossAgain:
    """The calls of the loss from event ``first`` on, where the last stage begins."""
    recorded, record, cut = graph.recorded, graph.recorded.record, graph.cut
    units = record.behind(number for number, event in enumerate(record.events) if event.is_unit)
    value_reads = [n for n, event in enumerate(record.events) if event.reads_values and n >= first]
    needed = record.behind([record.values[recorded.loss].maker, *value_reads]) - units
    own = {number for number in needed if number >= first and record.events[number].depends}
    calls = [record.events[number] for number in sorted(own)]
    read = {value for event in calls for value in event.reads if value in record.dependent}
    ends = sorted(value for value in read if record.values[value].maker not in own)
    drawing = [line_in_words(event.line) for event in calls if event.random]
    changed = [place.name for place in recorded.changes_again]
    names = {str(event.address[1]) for event in calls}
    why = recorded.parts.mixing
    if drawing or recorded.draws_python:
        why = f"random numbers are drawn ({(drawing or ['outside of torch'])[0]})"
    elif changed:
        why = f"forward changes '{changed[0]}' every time"
    elif not own.issuperset(recorded.parts.actions) or not ends:
        why = "a part of it is computed within the model, or by another stage"
    elif names & {"grad", "batch_norm"}:
        why = "it takes a gradient, or normalises over the batch"
    elif not all(cut.can_cross(value) and not cut.spec(value).reduced for value in ends):
        why = "it reads a tensor that cannot be joined from slices of a batch"
    made = {value: record.values[value] for value in ends}
    places = {v: (record.events[one.maker].address, one.slot) for v, one in made.items()}
    return LossAgain(first, places, why)
