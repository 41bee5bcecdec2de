"""Compare the losses of a few steps with the user's own loss code, run once on the whole step.

    steps 1, 2, 4, 8, ...   the last stage keeps what the losses of its micro-batches read
    before the optimizer    joined, and given to the same lines, without weights and gradients

So a step whose loss is another program's than the example's is found, at a cost that vanishes.
"""

from collections.abc import Callable, Sequence
from math import isfinite, nan
from typing import Any

import torch.distributed as dist

from penstock.capture.forward.loss_again import Ends, LossAgain, loss_again
from penstock.capture.record.outside_state import kept_random_state
from penstock.device import free_memory, without_tf32
from penstock.errors import RunFailed
from penstock.runtime.engine import Engine
from penstock.runtime.metrics import Totals
from penstock.runtime.verify.result import tolerance_of
from penstock.runtime.verify.verify import moved_by_rounding
from penstock.text import size_text
from penstock.torch_internals import forward_hooks, pytree

COPIES = 8
"""Multiple of what the loss reads that must fit into free memory, to join it and compute on it."""

NOISE = 64.0
"""Multiple of a loss's change by rounding of what it reads that a difference may reach."""


class LossCheck:
    """Comparison of the losses of steps, which `VerifiedSteps` chooses.

    ``seen`` has what is kept for each kind of batch; None: its losses cannot be compared, of which
    ``say`` gets a line, on rank 0.
    """

    def __init__(self, engine: Engine, say: Callable[[str], None]) -> None:
        self._engine, self._say = engine, say
        self.seen = dict[int, LossAgain | None]()
        self._why_not = ""

    def begin(self, samples: int) -> bool:
        """Keep on last stages what the next step's loss reads; return whether it is comparable."""
        engine, kind = self._engine, self._engine.kinds.number
        graph, state = engine.graph, engine.graph.state
        if kind not in self.seen:
            stage = engine.plan.stages[-1]
            first = graph.cut.bounds[-2 if stage.by_block else stage.layers.start]
            again = self.seen[kind] = loss_again(graph, first)
            if graph.whole_loss:
                self.seen[kind] = None  # it is computed in this way in every step
            elif again.why:
                self._leave_out(again.why)
        again = self.seen[kind]
        if again is not None:
            specs = [graph.cut.spec(value) for value in again.ends]
            size = COPIES * sum(spec.bytes_for(samples) for spec in specs)
            named = graph.program.named_modules()  # those of other stages' modules run here, too
            hooked = next((path for path, module in named if forward_hooks(module)), None)
            self._why_not = ""
            if size > free_memory(engine.world.device).bytes:
                self._why_not = f"it needs {size_text(size)} at once"
            elif hooked is not None:
                self._why_not = f"the forward hooks of module '{hooked}' would run once more"
            state.again, state.ends = None if self._why_not else again, {}
        return again is not None

    def _leave_out(self, why: str) -> None:
        self.seen[self._engine.kinds.number] = None
        if self._engine.world.rank == 0:
            self._say(f"losses of later steps are not compared with your loss code: {why}")

    @without_tf32()
    def compare(self, totals: Totals, samples: int, step: int) -> None:
        """Compare the loss of a step, before anything is updated; all ranks must call this."""
        engine, state = self._engine, self._engine.graph.state
        kept = [state.ends[name] for name in sorted(state.ends)]
        state.again, state.ends = None, {}
        own: list[Any] = [nan, 0.0, self._why_not]
        try:
            own[:2] = self._loss(kept, samples, totals.loss)
        except Exception as error:
            text = f"{type(error).__name__}: {error}".partition("\n")[0]
            own[2] = f"it does not run by itself: {text}"
        of_ranks = engine.world.all_gather(own)
        why = next((text for _, _, text in of_ranks if text), "")
        if why:
            self._leave_out(why)
        for loss, allowed, _ in of_ranks:
            if not abs(totals.loss - loss) <= allowed and allowed and isfinite(totals.loss):
                raise RunFailed(
                    f"step {step} was not taken: its loss is {totals.loss:.9g}, and that of your "
                    f"loss code on the outputs of the whole step {loss:.9g}, so micro-batches are "
                    f"weighed for another loss than this one; capture again with such a batch "
                    f"(other_examples), give the terms as a list, loss=[(1.0, term), ...], or use "
                    f"one micro-batch; Safety(check_loss=False) trains all the same"
                )

    def _loss(self, kept: list[Ends], samples: int, loss: float) -> tuple[float, float]:
        """The loss of the whole step, and how far from it ``loss`` may be; 0 if there is none."""
        engine = self._engine
        last = len(engine.plan.stages) - 1
        place = next((place for place in engine.places if place.stage == last), None)
        again = self.seen[engine.kinds.number]
        if place is None or again is None:
            return nan, 0.0
        group = engine.groups.get(engine.plan.device_groups[place.group])
        if group is not None:
            every: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(every, kept, group)
            kept = [one for own in every for one in own]
            kept = pytree.tree_map(lambda tensor: tensor.to(engine.world.device), kept)
        if sum(next(iter(leaves.values())).shape[0] for leaves, _ in kept) != samples:
            return nan, 0.0  # the stage is compiled, or copies of it have some samples each
        module = engine.stages.programs[last].module

        def computed(some: Sequence[Ends]) -> float:
            with kept_random_state(engine.world.device), engine.autocast():
                return float(again.loss(engine.graph, module, some))

        found = computed(kept)
        limit = tolerance_of(engine, [engine.graph.cut.spec(value).dtype for value in again.ends])
        allowed = limit * max(abs(found), abs(loss))
        if not abs(loss - found) <= allowed:
            near = pytree.tree_map(lambda t: moved_by_rounding([t], 1)[0].to(t.dtype), kept)
            allowed = max(allowed, NOISE * abs(computed(near) - found))
        return found, allowed
