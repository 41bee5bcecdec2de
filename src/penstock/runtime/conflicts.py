"""Uses that exclude one another in a run: one table, which `Pipeline` and jobs both read.

A use is a name with the words for it in messages, ``{"compile": "compile=True"}``; with empty words
it is none.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import BadInput
from penstock.plan.choices import CHOICES, REFUSED, SCHEDULES, choices_of, kinds_of_schedule
from penstock.plan.ordering import has_forwards_first, order_of, schedule_refusal
from penstock.plan.plan import Plan

if TYPE_CHECKING:  # jobs are checked before torch is loaded
    import torch
    from torch.optim import Optimizer

    from penstock.capture.layer_graph import LayerGraph


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two uses that exclude one another, why, and what to do."""

    this: str
    that: str
    because: str
    remedy: str = "leave one of them out"


WHOLE_PARAMETERS = ("Adafactor", "LBFGS", "Muon")
"""Optimizers of torch whose step on a shard differs from that on the whole parameter."""

TRIED_STEPS = 5
"""Rules that look at all parameters, such as Prodigy's, show it after a few steps."""

NOT_IN_GROUPS = "leave it out, or plan without tensor groups"
ONE_UPDATE = "it needs one update of all stages, and here each has its own"
KEEPS_COPIES = "it keeps copies of the forward's weights, and the backward uses newer ones"
ALONE = "each pipeline has its own gradients, of which no other rank has a part"
TWO_AT_ONCE = "two batches are in the pipeline at once, and all must be of one kind there"
SAME_WEIGHTS = "leave it out, or use a schedule whose passes use the same weights, as 'pipedream'"
BY_EVALUATION = (
    'let it follow an evaluation: update=Update(schedule_follows="evaluation"), step_schedule()'
)
FLUSHED = "use a schedule with a flush, such as '1f1b'"

BY_SLICES = "{}, or give the loss as a list, loss=[(1.0, loss)], for its mean over micro-batches"

ONE_SLICE = BY_SLICES.format(
    "use one micro-batch and one replica; or compute with a tensor, detach(), in place of the "
    "number, in a loss function that keeps nothing, which schedule 'gpipe' calls once for all "
    "samples"
)

THAWED = "call save(), make a new Pipeline from the model, and load()"

REMEDIES = {
    "thawed": THAWED,
    "tensor groups": NOT_IN_GROUPS,
    "tied stages": "keep the layers that use it in one stage, or let these stages divide nothing",
    "whole parameters": "use one that treats every element alone, as AdamW or SGD",
}
"""Remedies for a refused choice of the plan, by feature."""

CONFLICTS = (
    Conflict(
        "tensor groups",
        "not in groups",
        "a group holds a stage once, with one version of its weights",
        NOT_IN_GROUPS,
    ),
    *(
        Conflict("tensor groups", setting, "it is not built for shards", NOT_IN_GROUPS)
        for setting in ("compile", "kinds", "meetings")
    ),
    Conflict("tensor groups", "thawed", "what is trained is fixed", THAWED),
    *(
        Conflict(feature, choice, because, REMEDIES.get(feature, Conflict.remedy))
        for (choice, feature), because in REFUSED.items()
    ),
    Conflict(
        "tensor groups",
        "whole parameters",
        "it computes a parameter's step from all of it, of which a group's ranks hold shards",
        "use one that treats every element alone, as AdamW or SGD, or plan without tensor groups",
    ),
    Conflict(
        "all parameters",
        "several stages",
        "it steps a parameter otherwise beside others, as a trial on two small ones shows, and a "
        "rank has those of its stages only",
        "use one that steps each parameter by its own gradient, as AdamW, or plan one stage",
    ),
    Conflict(
        "early backward",
        "whole loss",
        "a backward of its last stage comes before some forward",
        BY_SLICES.format("use schedule 'gpipe'"),
    ),
    *(
        Conflict(use, "whole loss", because, BY_SLICES.format(Conflict.remedy))
        for use, because in (
            ("no flush", "all samples of a step are in the loss"),
            ("mirrored", "each copy of the last stage has some of the samples"),
            ("tensor groups", "it is not built for shards"),
            ("meetings", ALONE),
            ("accumulate", "it needs all samples of a step in one batch"),
        )
    ),
    Conflict(
        "dense gradients",
        "sparse optimizer",
        "those of sparse tables are summed as dense ones, too",
        "use Adam or AdamW, which train the rows that a batch does not read as plain Adam does",
    ),
    *(
        Conflict(use, "one slice", "each would take a number of its own samples", ONE_SLICE)
        for use in ("slices", "accumulate")
    ),
    Conflict(
        "no flush", "host state", "each stage steps between passes, which would wait", FLUSHED
    ),
    Conflict("no flush", "no optimizer", "that needs an optimizer", "give it one"),
    Conflict("no flush", "loss_scaling", ONE_UPDATE, "use bfloat16"),
    Conflict("no flush", "accumulate", ONE_UPDATE, "set it to 1, or use another schedule"),
    Conflict(
        "no flush",
        "skip",
        "a step cannot be left out afterwards",
        'set it to "stop" (or to "roll-back" in a job)',
    ),
    Conflict("newer weights", "autocast", KEEPS_COPIES, SAME_WEIGHTS),
    Conflict("newer weights", "compile", KEEPS_COPIES, SAME_WEIGHTS),
    Conflict(
        "no flush", "by loss", "the loss is known after the next step has begun", BY_EVALUATION
    ),
    Conflict(
        "no flush", "average", "weights change before the callback of a step is called", FLUSHED
    ),
    Conflict("meetings", "average", "pipelines have weights of their own between meetings"),
    Conflict("no flush", "kinds", TWO_AT_ONCE, "use a schedule with a flush"),
    *(Conflict("meetings", choice, ALONE) for choice in ("optimizer", "parameters")),
    Conflict("meetings", "no optimizer", "that needs an optimizer", "give it one"),
    Conflict("meetings", "no flush", "pipelines meet after a step of all stages", FLUSHED),
    Conflict("meetings", "mirrored", "a stage's two copies have other rows", FLUSHED),
    Conflict(
        "meetings", "loss_scaling", "pipelines would have scales of their own", "use bfloat16"
    ),
    Conflict("meetings", "thawed", "what is trained is fixed", THAWED),
    Conflict(
        "meetings",
        "tied",
        "their copies would need a sum in every step",
        "put the layers that use it into one stage, or untie it",
    ),
    Conflict("meetings", "verified later", "the pipelines' weights differ between meetings"),
    Conflict("meetings", "one process", "replicas of a stage are one there", "use processes"),
    Conflict(
        "roll-back",
        "no checkpoints",
        "a run goes back to its last checkpoint",
        "set checkpoint_every to the number of steps between checkpoints",
    ),
    *(
        Conflict("no evaluations", use, "it follows evaluations", "set evaluate_every above 0")
        for use in ("stop early", "keep best")
    ),
    Conflict("keep best", "average", "evaluations are of the average, and not of what is kept"),
)


def check_conflicts(uses: Mapping[str, str], whose: str = "") -> None:
    """Raise `BadInput` for the first two ``uses`` that exclude one another; ``whose`` begins it.

    >>> check_conflicts({"no flush": "'pipedream'", "no optimizer": "no optimizer"})
    Traceback (most recent call last):
        ...
    penstock.errors.BadInput: no optimizer does not work with 'pipedream': that needs an \
optimizer; give it one
    """
    for rule in CONFLICTS:
        if uses.get(rule.this) and uses.get(rule.that):
            raise BadInput(
                f"{whose}{uses[rule.that]} does not work with {uses[rule.this]}: {rule.because}; "
                f"{rule.remedy}"
            )


SETTINGS: Mapping[str, tuple[str, Callable[..., bool]]] = {
    "tensor groups": ("tensor_parallel.ranks", bool),
    "autocast": ("autocast", lambda dtype: dtype not in (None, "off")),
    "loss_scaling": ("autocast", lambda dtype: str(dtype).removeprefix("torch.") == "float16"),
    "optimizer": ("constraints.sharding", lambda choice: choice == "optimizer"),
    "compile": ("compile", bool),
    "whole parameters": (
        "optimizer.name",
        lambda name: name == "muon" or name.rpartition(":")[2] in WHOLE_PARAMETERS,
    ),
    "no optimizer": ("optimizer", lambda make: make is None),
    "accumulate": ("accumulate", lambda batches: batches > 1),
    "skip": ("on_non_finite", lambda policy: policy == "skip"),
    "roll-back": ("on_non_finite", lambda policy: policy == "roll-back"),
    "no checkpoints": ("checkpoint_every", lambda steps: steps == 0),
    "no evaluations": ("evaluate_every", lambda steps: steps == 0),
    "stop early": ("stop_early", bool),
    "keep best": ("keep_best", bool),
    "meetings": ("meet_every", bool),
    "average": ("average_decay", bool),
    "host state": ("constraints.state_on", lambda place: place == "host"),
    "verified later": ("verify_every", bool),
    "one process": ("transport", lambda transport: transport == "in-process"),
}
"""The uses that are settings, of `Pipeline` or of a job: the setting, and which values of it."""


def uses_of_settings(settings: Mapping[str, object], *, toml: bool = False) -> dict[str, str]:
    """The uses of settings by name, in words as in Python (without a table's), or as in a job file.

    >>> uses_of_settings({"accumulate": 2, "compile": False})
    {'accumulate': 'accumulate=2'}
    >>> uses_of_settings({"on_non_finite": "skip"}, toml=True)
    {'skip': 'on_non_finite = "skip"'}
    """
    uses: dict[str, str] = {}
    for use, (name, is_use) in SETTINGS.items():
        if name in settings and is_use(value := settings[name]):
            text = json.dumps(value) if toml or isinstance(value, str) else str(value)
            uses[use] = f"{name} = {text}" if toml else f"{name.rpartition('.')[2]}={text}"
    return uses


def uses_of_graph(graph: "LayerGraph", plan: Plan) -> dict[str, str]:
    """The uses of a captured model under a plan."""
    tied = shared = ""
    for use in graph.parameter_uses:
        users = [n for n, s in enumerate(plan.stages) if not set(use.layers).isdisjoint(s.layers)]
        divides = any(plan.stages[stage].sharding == "parameters" for stage in users)
        if len(users) > 1 and not use.is_buffer:
            words = f"parameter '{use.name}', which stages {users} use"
            tied = tied or words * divides
            shared = shared or words * use.requires_grad
    return {
        "tied stages": tied,
        "tied": shared,
        "kinds": "a model with other_examples" * bool(graph.others),
        "compile": "compile=True" * graph.compiles,
        "whole loss": graph.whole_loss and f"a loss over the whole batch ({graph.whole_loss})",
        "one slice": graph.one_slice and f"a loss over the whole batch ({graph.one_slice})",
        "early backward": f"schedule '{plan.schedule}'"
        * (bool(graph.whole_loss) and not has_forwards_first(order_of(plan), len(plan.stages) - 1)),
    }


def uses_of_training(optimizer: "Optimizer | None", by_loss: str = "") -> dict[str, str]:
    """The uses of an optimizer, and of a schedule of class ``by_loss`` that follows the loss."""
    kind = type(optimizer).__name__
    return {
        "whole parameters": f"optimizer {kind}" * (kind in WHOLE_PARAMETERS),
        "dense gradients": "the gradients of a pipeline",
        "sparse optimizer": f"optimizer {kind}" * (kind == "SparseAdam"),
        "all parameters": f"optimizer {kind}" * looks_at_all(optimizer),
        "by loss": by_loss and f"{by_loss}, which follows the loss of every step,",
    }


def looks_at_all(optimizer: "Optimizer | None") -> bool:
    """Return whether an optimizer steps two small parameters otherwise together than each alone.

    One that cannot be made again of its class and defaults is not tried.
    """
    if optimizer is None or not optimizer.defaults:
        return False
    import torch
    from torch import nn

    def stepped(*groups: Sequence[int]) -> "dict[int, torch.Tensor]":
        found = dict[int, torch.Tensor]()
        for own in groups:
            parameters = [nn.Parameter(torch.full((4, 4), 1.0 + n)) for n in own]
            made: Optimizer = type(optimizer)(parameters, **optimizer.defaults)
            for step in range(TRIED_STEPS):
                for n, parameter in zip(own, parameters, strict=True):
                    slope = torch.linspace(-1, 2, 16).reshape(4, 4)
                    parameter.grad = (slope + 0.1 * step) * 10.0**n
                made.step()
            found |= {n: p.detach() for n, p in zip(own, parameters, strict=True)}
        return found

    try:
        with torch.random.fork_rng(devices=[]):
            together, apart = stepped((0, 1)), stepped((0,), (1,))
    except Exception:
        return False
    return any(not torch.allclose(together[n], apart[n]) for n in together)


def uses_of(plan: Plan, whose: str = "a plan") -> dict[str, str]:
    """The uses of a plan, called ``whose``."""
    name, kinds = f"schedule '{plan.schedule}'", kinds_of_schedule(plan.schedule)
    refusal = schedule_refusal(plan.schedule, tensor_groups=bool(plan.tensor_groups))
    uses = {
        "slices": f"{whose} of several micro-batches or replicas"
        * (plan.micro_batches > 1 or plan.stages[-1].replicas > 1),
        "several stages": f"{whose} of several stages"
        * (len({s.devices for s in plan.stages}) > 1),
        "tensor groups": f"the tensor groups of {whose}" * bool(plan.tensor_groups),
        "not in groups": f"{name} (it {refusal})" * bool(refusal),
        **{kind: f"{name} (it {words})" * (kind in kinds) for kind, words in SCHEDULES.items()},
        **{
            choice: f"{whose} with {words}"
            for choice, words in CHOICES.items()
            if any(choice in choices_of(stage) for stage in plan.stages)
        },
    }
    if (
        "no flush" in kinds
        and not plan.tensor_groups
        and order_of(plan).weights.version == "newest"
    ):
        uses["newer weights"] = f"{name} (its backwards use newer weights than its forwards)"
    if plan.state_on == "host":
        uses["host state"] = f"{whose} with optimizer state in host memory"
    return uses
