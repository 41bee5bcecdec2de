"""Run one stage on this rank's rows: forward, backward, its two halves, recompute."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.capture.batch.lengths import LengthsOf
from penstock.capture.contract import TensorSpec
from penstock.capture.forward.call import ProgramCall, StageCall, entering
from penstock.capture.forward.deferred_weights import DeferredGradients, run_backward
from penstock.capture.forward.partial_forward import RunContext
from penstock.capture.forward.stage_module import StageProgram
from penstock.capture.record.outside_state import RandomState, random_state
from penstock.runtime.gradients.buckets import uncounted
from penstock.runtime.stage.random_stream import replayed
from penstock.schedule.action import ActionKind

Tensors: TypeAlias = Sequence[torch.Tensor | None]
"""Boundary tensors or their gradients, in the stage's order; ``None`` is a gradient of zero."""


Work: TypeAlias = Callable[[int, Tensors], Tensors]
"""Function of an action of a micro-batch: takes what was received, returns what to send."""


class StageRunner(Protocol):
    """The interface of a stage for the action loop."""

    def work(self, kind: ActionKind) -> Work:
        """The function that runs actions of one kind.

        A forward takes the received tensors and returns those to send. A backward, or its first
        half, takes the gradients of the sent tensors and returns those of the received tensors. The
        second half of a backward and a recompute take and return nothing.
        """
        ...


@dataclass(frozen=True)
class StageInputs:
    """The inputs of a stage in one iteration: the leaves of this rank's rows by micro-batch.

    ``rows[m]`` is their number and may be 0. ``recomputed`` are the micro-batches whose forward
    keeps only its inputs. ``last_backward`` is the micro-batch that completes the parameters'
    gradients (-1: none). ``halved`` are the micro-batches with a backward in two halves.
    ``ranges[m]`` says where they are among the ``samples`` of the batch on all ranks.
    ``lengths`` are those of the batch. ``names`` are unique to each micro-batch in the run, and
    equal on all ranks, so that what stages draw between modules is equal.
    """

    leaves: tuple[tuple[torch.Tensor, ...], ...]
    rows: tuple[int, ...]
    recomputed: frozenset[int] = frozenset()
    last_backward: int = -1
    training: bool = True
    halved: frozenset[int] = frozenset()
    lengths: LengthsOf = ()
    names: tuple[tuple[int, ...], ...] = ()
    ranges: tuple[range, ...] = ()
    samples: int = 0


TakeOutputs: TypeAlias = Callable[[int, Mapping[int, torch.Tensor], torch.Tensor | None], None]
"""Callback with a micro-batch, its outputs by number, and the weight of its loss, if any."""


@dataclass(slots=True)
class LossTerm:
    """The mean loss of one slice and the number of terms in the mean."""

    loss: torch.Tensor
    weight: torch.Tensor


@dataclass(slots=True)
class Kept:
    """State that one micro-batch keeps between its forward and its backward.

    ``roots[i]`` is the place in the graph where the gradient of sent tensor ``i`` enters (``None``:
    it has no gradient). The sent tensors themselves are not kept: autograd saves those it needs.
    With ``borrowed`` the row belongs to another replica and does not count. ``idle`` are inputs
    whose gradients are zeros that only keep replicas together: they have none.
    """

    inputs: list[torch.Tensor]
    roots: list[GradientEdge | None]
    seed: torch.Tensor | None = None
    before: RandomState | None = None
    deferred: DeferredGradients | None = None
    borrowed: bool = False
    idle: Sequence[torch.Tensor] = ()


class ModuleRunner:
    """Runner of a stage of a captured model with autograd.

    ``synchronised``: the stage computes statistics together with its other replicas, or divides its
    parameters among them, so a replica without rows must take part too. It runs one borrowed row
    that does not count; in evaluation it does so only if its call gathers parameters. Every forward
    runs inside ``around_forward``, which gets this replica's number of rows. ``seed`` multiplies
    the gradient from which every backward of the loss starts. ``call`` is used to call the module
    (``None``: a `ProgramCall`). ``take_outputs`` gets the outputs of each forward that has any.
    """

    def __init__(
        self,
        program: StageProgram,
        device: torch.device,
        *,
        autocast: torch.dtype | None = None,
        synchronised: bool = False,
        around_forward: Callable[[int], AbstractContextManager[object]] | None = None,
        around_last_backward: Callable[[], AbstractContextManager[object]] = nullcontext,
        call: StageCall | None = None,
        take_outputs: TakeOutputs | None = None,
    ) -> None:
        self.program = program
        self._take_outputs = take_outputs if program.outputs else None
        self.loss_terms: list[LossTerm] = []
        self._loss_places: list[LossTerm] = []
        self.seed = 1.0
        self._module = program.module
        self._training_call = self._call = call or ProgramCall(program.module)
        self.device = device
        self._autocast = autocast
        self._synchronised = synchronised
        self._jointly = synchronised or self._call.gathers
        self._around_forward = around_forward
        self._around_last_backward = around_last_backward
        self._plain = autocast is None and around_forward is None
        # A reentrant checkpoint gives no gradients of chosen tensors, which the first half takes.
        self._whole = program.module.has_checkpoints(reentrant=True)
        self._grad_inputs = [i for i, spec in enumerate(program.received) if spec.requires_grad]
        self._trains = any(p.requires_grad for p in program.module.parameters())
        self._kept: dict[int, Kept] = {}
        self._work = StageInputs((), ())
        self.failure: Exception | None = None
        """Exception that a forward of the latest evaluation has raised."""

    def has_work(self, kind: ActionKind) -> bool:
        """Return whether actions of this kind have any effect in this stage.

        A stage without trained parameters computes no weight gradients. If nothing before it is
        trained either, it needs no backward at all.
        """
        return kind == "F" or self._trains or (kind != "W" and bool(self._grad_inputs))

    def work(self, kind: ActionKind) -> Work:
        """The function that runs actions of one kind."""
        match kind:
            case "F":
                return self.forward
            case "B":
                return self.backward
            case "I":
                return self.backward_input
            case "W":
                return lambda micro_batch, _: self.backward_weight(micro_batch)
            case "R":
                return lambda micro_batch, _: self.recompute(micro_batch)

    def begin(self, work: StageInputs) -> None:
        """Discard the last iteration and take the inputs of the next."""
        self._work = work
        call = self._training_call
        self._call = call if work.training else call.in_evaluation
        self._kept.clear()
        self.failure = None
        self._new_terms()

    def proceed(self, work: StageInputs) -> None:
        """Take the inputs of more micro-batches; those in flight are kept."""
        self._work = work
        self._new_terms()

    def _new_terms(self) -> None:
        """Allocate memory for all losses of the iteration at once.

        A small tensor kept for each micro-batch would take the place of a freed large one, which
        then no longer fits there: memory would grow with the number of micro-batches.
        """
        self.loss_terms = []
        if self.program.is_last:
            room = torch.zeros(2, len(self._work.rows), dtype=torch.float64, device=self.device)
            losses, weights = room[0].unbind(), room[1].unbind()
            self._loss_places = list(map(LossTerm, losses, weights))

    def reseed(self, micro_batch: int, factor: torch.Tensor) -> None:
        """Multiply the gradient from which the backward of a forwarded micro-batch will start."""
        kept = self._kept.get(micro_batch)
        if kept is not None and kept.seed is not None:
            kept.seed = (kept.seed * factor).to(kept.seed.dtype)

    def forward(self, micro_batch: int, received: Tensors) -> Tensors:
        """Run the stage on this rank's rows of ``micro_batch``."""
        work = self._work
        borrowed = work.rows[micro_batch] == 0
        if borrowed:
            if not (self._call.gathers or (self._synchronised and work.training)):
                return ()
            received = [s.zeros(1, work.lengths, self.device) for s in self.program.received]
        inputs = [tensor for tensor in received if tensor is not None]
        if not (work.training and self.has_work("B")):
            with torch.no_grad():
                return self._run(micro_batch, inputs, Kept(inputs, []))
        if micro_batch in work.recomputed:
            kept = Kept(inputs, [], before=random_state(self.device), borrowed=borrowed)
            with torch.no_grad():
                sent = self._run(micro_batch, inputs, kept)
        else:
            kept = Kept(inputs, [], borrowed=borrowed)
            sent = self._run(micro_batch, inputs, kept)
        self._kept[micro_batch] = kept
        return sent

    @property
    def gathers(self) -> bool:
        """True if ranks gather parameters in a forward, for which each must take part."""
        return self._call.gathers

    def blank(self, micro_batch: int) -> Tensors:
        """Zeros in the place of what a forward of this micro-batch sends."""
        rows, lengths = self._work.rows[micro_batch], self._work.lengths
        return [spec.zeros(rows, lengths, self.device) for spec in self.program.sent]

    def recompute(self, micro_batch: int) -> Tensors:
        """Run the forward again with the same random numbers and without updating buffers again."""
        kept = self._kept.get(micro_batch)
        if kept is not None and kept.before is not None:
            terms = len(self.loss_terms)
            with replayed(self._module, self.device, kept.before):
                self._run(micro_batch, kept.inputs, kept)
            del self.loss_terms[terms:]
            kept.before = None
        return ()

    def backward(self, micro_batch: int, gradients: Tensors) -> Tensors:
        """Run the whole backward; the last one also starts the sums of complete buckets."""
        kept = self._kept.pop(micro_batch, None) or Kept([], [])
        roots, seeds, around = self._seeds(micro_batch, kept, gradients)
        with around, self._around_backward(micro_batch):
            if roots:
                with self._module.in_backward(micro_batch), self._call.in_backward():
                    run_backward(roots, seeds)
        return self._input_gradients(kept)

    def backward_input(self, micro_batch: int, gradients: Tensors) -> Tensors:
        """Run the backward except for the weights of linear layers; frees the graph."""
        kept = self._kept.get(micro_batch)
        if kept is None:
            return ()
        roots, seeds, around = self._seeds(micro_batch, kept, gradients)
        deferred = kept.deferred
        with around, self._module.in_backward(micro_batch), self._call.in_backward():
            if roots and deferred is not None and deferred.products:
                entered = [kept.inputs[i] for i in self._grad_inputs]
                deferred.first_half(roots, seeds, entered, self._call.others())
            elif roots:
                run_backward(roots, seeds)
        self._kept[micro_batch] = Kept([], [], deferred=deferred)
        return self._input_gradients(kept)

    def backward_weight(self, micro_batch: int) -> Tensors:
        """Compute the weight gradients that the first half has deferred."""
        kept = self._kept.pop(micro_batch, None)
        with self._around_backward(micro_batch):
            if kept is not None and kept.deferred is not None:
                kept.deferred.accumulate()
        return ()

    def _run(self, micro_batch: int, inputs: list[torch.Tensor], kept: Kept) -> Tensors:
        """Run the module; record in ``kept`` where gradients will enter."""
        recording = torch.is_grad_enabled()
        if recording:
            for i in self._grad_inputs:
                inputs[i] = entering(inputs[i])
        work = self._work
        if recording and micro_batch in work.halved and not (self._whole or kept.borrowed):
            kept.deferred = DeferredGradients()
        again = kept.before is not None
        name = work.names[micro_batch] if work.names else (micro_batch,)
        keep, replay = again and not recording, again and recording
        self._call.set_context(RunContext(name, micro_batch, keep, replay, recording))
        if self._plain:
            outputs = self._call.run(work.leaves[micro_batch], inputs, kept.deferred)
        else:
            around, precision = self._surroundings(work.rows[micro_batch])
            with around, precision:
                outputs = self._call.run(work.leaves[micro_batch], inputs, kept.deferred)
        sent: list[torch.Tensor] = []
        for spec, output in zip(self.program.sent, outputs, strict=False):
            sent.append(output if output.dtype == spec.dtype else output.to(spec.dtype))
        # As roots of the backward too: what comes back for them is added to this stage's own.
        sent += [inputs[place] for place in self.program.relayed]
        if recording:
            kept.roots = [get_gradient_edge(t) if t.requires_grad else None for t in sent]
        if self.program.is_last:
            self._take_loss(micro_batch, outputs[len(sent)], outputs[len(sent) + 1], kept)
        # A recompute gives the same outputs again, so they are not taken twice.
        if self._take_outputs is not None and not (recording and kept.before is not None):
            numbers = self.program.outputs
            found = outputs[-len(numbers) :]
            weight = outputs[len(sent) + 1] if self.program.is_last else None
            self._take_outputs(micro_batch, dict(zip(numbers, found, strict=True)), weight)
        return sent

    def _take_loss(
        self, micro_batch: int, loss: torch.Tensor, weight: torch.Tensor, kept: Kept
    ) -> None:
        """Record the loss, and seed its backward with the number of terms in it."""
        if self._work.rows[micro_batch]:
            place = self._loss_places[micro_batch]
            place.loss.copy_(loss.detach())
            place.weight.copy_(weight)
            self.loss_terms.append(place)
        else:
            weight = torch.zeros_like(weight)
        if loss.requires_grad:
            kept.roots.append(get_gradient_edge(loss))
            kept.seed = (weight if self.seed == 1.0 else weight * self.seed).to(loss.dtype)

    def _surroundings(
        self, rows: int
    ) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        around = self._around_forward(rows) if self._around_forward else nullcontext()
        if self._autocast is None:
            return around, nullcontext()
        # Before torch 2.13 a weight that was cast without gradients had none later either.
        keeps = torch.is_grad_enabled() or self._call.records
        return around, torch.autocast(self.device.type, self._autocast, cache_enabled=keeps)

    def _seeds(
        self, micro_batch: int, kept: Kept, gradients: Tensors
    ) -> tuple[list[GradientEdge], list[torch.Tensor], AbstractContextManager[object]]:
        """The roots from which the backward starts, their gradients, and what is around it."""
        roots: list[GradientEdge] = []
        seeds: list[torch.Tensor] = []
        without: list[tuple[GradientEdge, TensorSpec]] = []
        lengths = self._work.lengths
        if kept.borrowed:
            gradients = [spec.zeros(1, lengths, self.device) for spec in self.program.sent]
        given: Tensors = gradients if kept.seed is None else [*gradients, kept.seed]
        for place, (root, gradient) in enumerate(zip(kept.roots, given, strict=False)):
            if root is not None and gradient is not None:
                roots.append(root)
                seeds.append(gradient)
            elif root is not None and self._jointly:
                without.append((root, self.program.sent[place]))
        if not (without or kept.borrowed):
            return roots, seeds, nullcontext()
        reached = set[torch.Tensor]() if kept.borrowed else leaves_behind(roots)
        # The other replicas wait for this one's part in what they do together.
        for root, spec in without:
            roots.append(root)
            seeds.append(spec.zeros(self._work.rows[micro_batch], lengths, self.device))
        kept.idle = [tensor for tensor in kept.inputs if tensor not in reached]
        return roots, seeds, uncounted(p for p in self._module.parameters() if p not in reached)

    def _around_backward(self, micro_batch: int) -> AbstractContextManager[object]:
        if micro_batch == self._work.last_backward:
            return self._around_last_backward()
        return nullcontext()

    def _input_gradients(self, kept: Kept) -> Tensors:
        """The gradients of the received tensors; ``None`` for those without one."""
        for tensor in kept.idle:
            tensor.grad = None
        return [tensor.grad for tensor in kept.inputs]


def leaves_behind(roots: Sequence[GradientEdge]) -> set[torch.Tensor]:
    """The leaves to which a backward from ``roots`` gives gradients."""
    nodes, found = [root.node for root in roots], set[torch.Tensor]()
    seen = set(nodes)
    for node in nodes:  # which grows
        leaf: torch.Tensor | None = getattr(node, "variable", None)
        if leaf is not None:
            found.add(leaf)
        more = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= more
        nodes += more
    return found
