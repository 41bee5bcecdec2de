"""State that steps update on one rank: optimizer, learning-rate schedule, loss scale.

The state is stored by the model's names, so that any plan can load it. Tensors are called
``model.<parameter or buffer>``, ``optimizer.<parameter>.<key>`` and
``random.<rank>``. The rest is JSON: the settings of the optimizer's groups with the names of their
parameters, the learning-rate schedule, the number of steps.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from inspect import signature
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from penstock.capture.record.outside_state import RandomState
from penstock.errors import BadInput
from penstock.plan.ordering import updates_per_batch
from penstock.runtime.engine import Engine
from penstock.runtime.gradients.buckets import GradientBuckets
from penstock.runtime.gradients.loss_scaling import LossScaler
from penstock.runtime.metrics import StepMetrics, Totals, clip_factor
from penstock.runtime.options import MakeOptimizer, MakeSchedule, OnNonFinite, Options
from penstock.text import counted
from penstock.torch_internals import gradient_hooks

if TYPE_CHECKING:
    # Types only: training must not import these.
    from penstock.runtime.update.host_state import HostState
    from penstock.runtime.update.local_sgd import Meetings
    from penstock.runtime.verify.loss_check import LossCheck

ADAM = 2.0
"""The state, for each byte of parameters, of an optimizer that cannot be made of one parameter."""


@dataclass(frozen=True, slots=True)
class Updated:
    """The result of one step's update, with the learning rate and loss scale that it used.

    ``non_finite`` is the place of the bad numbers because of which the step was left out, if any.
    """

    learning_rate: float
    loss_scale: float
    skipped: bool
    non_finite: str = ""


def check_steps(stepped: Optimizer | LRScheduler, *given: float) -> None:
    """Raise `BadInput` for an optimizer or schedule whose ``step`` needs other arguments."""
    try:
        # A schedule replaces the optimizer's bound method with a function of its own.
        signature(type(stepped).step).bind(stepped, *given)
    except TypeError as problem:
        kind = type(stepped).__name__
        raise BadInput(
            f"{kind}.step() is called without arguments and needs them ({problem}); use one that "
            f"needs none, such as AdamW or LambdaLR, or a schedule that needs one metric"
        ) from None


def made_of(make: MakeOptimizer, parameters: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
    """The optimizer of these parameters; ``make`` gets their names if its argument is ``named``."""
    try:
        takes_names = next(iter(signature(make).parameters), "") == "named"
    except ValueError:  # a function of C++ without a signature
        takes_names = False
    hooks = [len(gradient_hooks(parameter)[1] or ()) for _, parameter in parameters]
    made = make(list(parameters) if takes_names else [parameter for _, parameter in parameters])
    kind = type(made).__name__
    for before, (name, parameter) in zip(hooks, parameters, strict=True):
        if len(gradient_hooks(parameter)[1] or ()) > before or kind == "CPUOffloadOptimizer":
            raise BadInput(
                f"optimizer {kind} takes the gradient of '{name}' from the backward by a hook, "
                f"before those of all micro-batches and replicas are summed; use one that reads "
                f'.grad in step(), such as AdamW (sharding="optimizer" divides its state, and '
                f'state_on="host" keeps it in host memory)'
            )
    return made


def state_bytes_of(
    make: MakeOptimizer, named: Iterable[tuple[str, torch.Tensor]]
) -> tuple[float, str]:
    """The bytes that an optimizer keeps for each byte of parameters, and its kind in words.

    It steps the smallest trained matrix, which is restored, or a small one of ones.
    """
    trained = [(n, p) for n, p in named if p.requires_grad and p.dim() > 1]
    unnamed = "", torch.ones(2, 2)
    name, like = min(trained, key=lambda own: own[1].numel(), default=unnamed)
    is_own = isinstance(like, nn.Parameter) and not like.is_meta
    parameter: Any = like if is_own else nn.Parameter(torch.ones(like.shape, dtype=like.dtype))
    value, gradient = parameter.detach().clone(), parameter.grad
    parameter.grad = torch.zeros_like(parameter)
    try:
        made = made_of(make, [(name, parameter)])
        made.step()
        state: Mapping[str, Any] = made.state[parameter]
    except Exception:  # one that needs more than a parameter; it is made again for training
        return ADAM, "unknown"
    finally:
        with torch.no_grad():
            parameter.copy_(value)
        parameter.grad = gradient
    kept = [v.nbytes for v in state.values() if isinstance(v, torch.Tensor) and v.dim()]
    return sum(kept) / parameter.nbytes, type(made).__name__


@dataclass(frozen=True, slots=True)
class Stepper:
    """An optimizer, and its learning-rate schedule; ``follows``: that is stepped with a metric."""

    optimizer: Optimizer
    schedule: LRScheduler | None
    follows: bool

    @classmethod
    def of(cls, optimizer: Optimizer, make: MakeSchedule | None) -> "Stepper":
        """An optimizer with the schedule that is made for it."""
        check_steps(optimizer)
        schedule = make(optimizer) if make is not None else None
        if schedule is None:
            return cls(optimizer, None, follows=False)
        try:
            check_steps(schedule)
        except BadInput:
            check_steps(schedule, 0.0)
            return cls(optimizer, schedule, follows=True)
        return cls(optimizer, schedule, follows=False)

    def step(self) -> None:
        """Update the weights, then the learning rate unless it follows a metric."""
        self.optimizer.step()
        if self.schedule is not None and not self.follows:
            self.schedule.step()


class Training:
    """The optimizer of this rank's parameters, its learning-rate schedule, and the step count.

    ``parameters`` are those that this rank steps, by their first names in the model; each set of
    them has an optimizer and a schedule of its own, ``steppers[i]``. There are several sets only
    where several stages of this rank update their weights at different times. Without
    ``optimizer`` steps are only counted. ``steps`` also counts steps that were skipped because
    gradients overflowed, so that a resumed run continues with the right batch. The learning-rate
    schedule counts only steps that were taken. ``on_non_finite`` says what follows a step whose
    loss or gradients are not finite. ``left_out`` is the number of latest steps that were left out
    one after another. ``resting`` has states of parameters that were trained before. ``meetings``
    are those of pipelines side by side that train alone. A schedule that follows a metric follows
    the loss of every step, if ``by_loss``. ``averages`` are those of the weights by name, if any
    are kept, and ``averaged``: the parameters have their values for now. ``loss_check`` compares
    the loss of the next step, if that is due. With ``on_host`` the optimizer's state is in host
    memory.
    """

    def __init__(
        self,
        parameters: Sequence[Sequence[tuple[str, nn.Parameter]]],
        device: torch.device,
        options: Options,
        *,
        meetings: "Meetings | None" = None,
        on_host: "HostState | None" = None,
    ) -> None:
        self.steps = self.left_out = 0
        self.by_loss = options.update.schedule_follows == "loss"
        self.loss_check: LossCheck | None = None
        self.averages: dict[str, torch.Tensor] | None = None
        self.averaged = False
        self.meetings = meetings
        self.resting: tuple[dict[str, torch.Tensor], dict[str, Any]] = {}, {}
        self.on_non_finite: OnNonFinite = options.update.on_non_finite
        scaling = options.loss_scaling
        self.scaler = LossScaler(scaling) if scaling is not None else None
        self.clip_norm = options.clip_norm
        self.on_host = on_host
        self.names: dict[torch.Tensor, str] = {p: name for own in parameters for name, p in own}
        self.steppers: list[Stepper] = []
        make = options.optimizer
        if make is not None:
            # A stage without parameters must also follow the learning-rate schedule.
            nothing = nn.Parameter(torch.zeros(0, device=device))
            with self.in_place():
                made = [made_of(make, own or [("", nothing)]) for own in parameters]
            schedule = options.learning_rate_schedule
            self.steppers = [Stepper.of(each, schedule) for each in made]

    def in_place(self) -> AbstractContextManager[None]:
        """Hold the parameters where the optimizer keeps its state."""
        return self.on_host.in_place() if self.on_host is not None else nullcontext()

    @property
    def optimizer(self) -> Optimizer | None:
        """The first optimizer."""
        return self.steppers[0].optimizer if self.steppers else None

    @property
    def schedule(self) -> LRScheduler | None:
        """The learning-rate schedule of the first optimizer."""
        return self.steppers[0].schedule if self.steppers else None

    @property
    def learning_rate(self) -> float:
        """The rate of the optimizer's first group for the next step; 0 without an optimizer."""
        return float(self.optimizer.param_groups[0]["lr"]) if self.optimizer is not None else 0.0

    def seed(self, samples: int) -> float:
        """The factor on the loss in a step of ``samples`` samples."""
        return self.scaler.seed(samples) if self.scaler is not None else 1.0

    def update(self, totals: Totals, seed: float, buckets: GradientBuckets) -> Updated:
        """Clip, update the weights and then the learning rate; all skipped after an overflow.

        ``buckets`` hold the gradients, summed and multiplied by ``seed``.
        """
        update = self.judge(totals, self.learning_rate)
        if not update.skipped:
            buckets.scale(1.0 / totals.weight / seed)  # of the unscaled mean loss
            self.step(buckets, self.clip_factor(totals))
        return update

    def judge(self, totals: Totals, rate: float) -> Updated:
        """Count a step at a learning rate, and decide from its numbers whether to take it.

        Changes no weights.
        """
        scaler = self.scaler
        totals.check_finite(self.steps + 1, rate, loss_scaled=scaler is not None)
        scale = scaler.scale if scaler is not None else 1.0
        overflow = not isfinite(totals.gradient_norm)
        if scaler is not None:
            scaler.update(overflow, totals.weight, self.steps + 1)
        self.steps += 1
        self.left_out = 0
        return Updated(rate, scale, overflow)

    def leave_out(self, why: str) -> Updated:
        """Count a step that is not taken because its numbers are not finite."""
        self.steps += 1
        self.left_out += 1
        scale = self.scaler.scale if self.scaler is not None else 1.0
        return Updated(self.learning_rate, scale, True, why)

    def clip_factor(self, totals: Totals) -> float:
        """The factor that clips the gradients of the mean loss."""
        return 1.0 if self.clip_norm is None else clip_factor(totals.gradient_norm, self.clip_norm)

    def step(self, buckets: GradientBuckets | None, factor: float = 1.0) -> None:
        """Multiply gradients by ``factor``, update the weights, then the learning rate."""
        if buckets is not None:
            buckets.scale(factor)
            buckets.narrow()
        with self.in_place():
            for stepper in self.steppers:
                stepper.step()

    @property
    def follows(self) -> str:
        """The class of the learning-rate schedule that is stepped with a metric; or empty."""
        found = (type(s.schedule).__name__ for s in self.steppers if s.follows)
        return next(found, "")

    def follow(self, metric: float) -> None:
        """Step the learning-rate schedules that follow a metric."""
        for stepper in self.steppers:
            if stepper.follows:
                step: Any = stepper.schedule
                step.step(metric)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The optimizer's tensors, by name."""
        own = {
            f"optimizer.{name}.{key}": value
            for name, key, value in self._optimizer_state()
            if isinstance(value, torch.Tensor)
        }
        outer = self.meetings.tensors if self.meetings is not None else {}
        averages = {f"average.{name}": own for name, own in (self.averages or {}).items()}
        return own | outer | averages

    def _optimizer_state(self) -> Iterator[tuple[str, str, Any]]:
        """The state of optimizers: the name of each parameter, a key, and the value."""
        for stepper in self.steppers:
            for parameter, state in stepper.optimizer.state.items():
                if parameter in self.names:
                    yield from ((self.names[parameter], *item) for item in state.items())

    def state(self) -> dict[str, Any]:
        """The rest of the state as JSON values."""
        optimizers = [stepper.optimizer for stepper in self.steppers]
        groups = [group for each in optimizers for group in group_settings(each, self.names)]
        entries: dict[str, dict[str, Any]] = {}
        for name, key, value in self._optimizer_state():
            if not isinstance(value, torch.Tensor):
                entries.setdefault(name, {})[key] = value
        return {
            "steps": self.steps,
            "groups": groups,
            "entries": entries,
            "schedule": self.schedule.state_dict() if self.schedule is not None else None,
            "loss_scaling": self.scaler.state() if self.scaler is not None else None,
            "meetings": self.meetings.state() if self.meetings is not None else None,
        }

    def restore(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        """Restore what `tensors` and `state` returned, on this rank or merged over all ranks."""
        with self.in_place():
            for stepper in self.steppers:
                restore_optimizer(stepper.optimizer, self.names, tensors, state)
        for stepper in self.steppers:
            if stepper.schedule is not None and state["schedule"] is not None:
                stepper.schedule.load_state_dict(state["schedule"])
        # Checkpoints of runs without loss scaling lack it.
        if self.scaler is not None and state.get("loss_scaling"):
            self.scaler.restore(state["loss_scaling"])
        if self.meetings is not None:
            self.meetings.restore(tensors, state.get("meetings"))
        if self.averages is not None:
            found = {p: tensors.get(f"average.{name}") for p, name in self.names.items()}
            self.averages.clear()
            self.averages |= {
                self.names[p]: value.to(p.device, copy=True)
                for p, value in found.items()
                if value is not None
            }
        self.steps = state["steps"]

    def go_on_from(self, before: "Training") -> None:
        """Take over the state of ``before``, which trained other parameters of this rank.

        The optimizer's state of a parameter that is frozen rests until it is trained again. Its
        group has the settings of today.
        """
        if before.averages is not None:
            self.averages = {}
        state, (tensors, entries) = before.state(), before.resting
        groups = sum(len(stepper.optimizer.param_groups) for stepper in self.steppers)
        if self.steppers and groups != len(state["groups"]):
            raise BadInput(
                f"requires_grad was changed, and now the optimizer has "
                f"{counted(groups, 'group')} of parameters, where it had "
                f"{len(state['groups'])}; make equally many, some of them empty"
            )
        self.resting = {**tensors, **before.tensors()}, {**entries, **state["entries"]}
        self.restore(self.resting[0], {**state, "entries": self.resting[1]})
        self.left_out = before.left_out


@dataclass(frozen=True, slots=True)
class StepBegin:
    """State of a rank before a step: the state of its random numbers, and copies of buffers.

    ``step`` is the number of steps before it.
    """

    step: int
    random: RandomState
    buffers: Sequence[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(cls, engine: Engine, step: int, *, copies: bool) -> "StepBegin":
        """Record the state before a step that may fail; copy buffers if it may be undone."""
        buffers = engine.held.named_buffers() if copies else ()
        return cls(step, engine.random.state, [(buffer, buffer.clone()) for _, buffer in buffers])

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Give the buffers the values from before the step."""
        for buffer, value in self.buffers:
            buffer.copy_(value)


def stepped_together(engine: Engine) -> list[list[tuple[str, nn.Parameter]]]:
    """The parameters that this rank steps, by name, in sets that are updated at the same time."""
    stepped = engine.held.stepped_parameters()
    if not updates_per_batch(engine.plan):
        return [stepped]
    programs = engine.stages.programs.values()
    used = [set(program.module.parameters()) for program in programs] or [set()]
    return [[(name, p) for name, p in stepped if p in own] for own in used]


def metrics_of(step: int, totals: Totals, update: Updated, samples: int) -> StepMetrics:
    """The metrics that a step returns."""
    return StepMetrics(
        step,
        totals.loss,
        totals.gradient_norm,
        update.learning_rate,
        samples,
        totals.seconds,
        totals.bubble,
        update.skipped,
        update.loss_scale,
        {name: value for name, (value, _) in totals.means.items()},
        update.non_finite,
    )


def merged_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of all ranks merged, so that each rank finds its own under any plan."""
    return {
        **states[0],
        "groups": [group for state in states for group in state["groups"]],
        "entries": {name: e for state in states for name, e in state["entries"].items()},
    }


def group_settings(optimizer: Optimizer, names: Mapping[torch.Tensor, str]) -> list[dict[str, Any]]:
    """The settings of every parameter group (learning rate, ...), with its parameters' names."""
    return [
        {
            "settings": {key: plain(value) for key, value in group.items() if key != "params"},
            "names": [names[parameter] for parameter in group["params"] if parameter in names],
        }
        for group in optimizer.param_groups
    ]


def restore_optimizer(
    optimizer: Optimizer,
    names: Mapping[torch.Tensor, str],
    tensors: Mapping[str, torch.Tensor],
    saved: Mapping[str, Any],
) -> None:
    """Restore the optimizer's state of its parameters, whichever ranks saved it."""
    known = saved["groups"]
    settings_of = {name: group["settings"] for group in known for name in group["names"]}
    kept: dict[str, dict[str, Any]] = {n: dict(own) for n, own in saved["entries"].items()}
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            owner, _, key = rest.rpartition(".")
            kept.setdefault(owner, {})[key] = value
    state_dict = optimizer.state_dict()
    groups = optimizer.param_groups
    owners = [names.get(parameter, "") for group in groups for parameter in group["params"]]
    pairs = zip(state_dict["param_groups"], groups, strict=True)
    for place, (described, actual) in enumerate(pairs):
        first = next((names[p] for p in actual["params"] if p in names), "")
        # A group without parameters here takes those of the first rank's group of that number.
        like = known[min(place, len(known) - 1)]["settings"] if known else {}
        settings = settings_of.get(first) or like
        # JSON has lists for tuples, such as Adam's betas.
        as_given = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
        described.update(as_given)
    state_dict["state"] = {n: kept[owner] for n, owner in enumerate(owners) if owner in kept}
    optimizer.load_state_dict(state_dict)


def plain(value: Any) -> Any:
    """A setting as a JSON value."""
    return value.item() if isinstance(value, torch.Tensor) else value
