"""Choices about a stage's memory and their conflicts: one table, for planning and the runtime.

choice                     what the devices of a stage do
optimizer                  divide the optimizer's state (ZeRO-1)
parameters                 divide parameters, gradients and that state (ZeRO-3, FSDP)
blocks                     keep what each block reads, and run it again before its backward
"""

from collections.abc import Mapping

from penstock.plan.plan import Stage
from penstock.schedule.registry import FAMILIES

CHOICES: Mapping[str, str] = {
    "optimizer": "divided optimizer state",
    "parameters": "divided parameters",
    "blocks": "recompute by block",
}
"""The choices, with the words for them."""

SCHEDULES: Mapping[str, str] = {
    "no flush": "has no flush",
    "split backwards": "splits backwards",
    "mirrored": "holds stages twice",
}
"""Properties of schedules, with the words for them."""

NOT_IN_GROUPS = "it is not built for shards"
IS_FIXED = "what is trained is fixed"

REFUSED: Mapping[tuple[str, str], str] = {
    ("optimizer", "no flush"): "it needs one update of all stages, and here each has its own",
    ("optimizer", "thawed"): IS_FIXED,
    ("optimizer", "tensor groups"): NOT_IN_GROUPS,
    ("parameters", "split backwards"): "gradients are summed when a block's first half ends",
    ("parameters", "mirrored"): "each copy would have shares of its own",
    ("parameters", "no flush"): "the versions of the weights are whole",
    ("parameters", "tied stages"): "its gradients are summed where it is divided",
    ("parameters", "thawed"): IS_FIXED,
    ("parameters", "compile"): "compiled code does not see when weights are gathered",
    ("parameters", "whole parameters"): "a rank has only some rows of each parameter",
    ("parameters", "tensor groups"): NOT_IN_GROUPS,
    ("blocks", "split backwards"): "each half would need the activations",
    ("blocks", "no flush"): "the second forward would see other weights",
}
"""Refused pairs of a choice and a use (see `penstock.runtime.conflicts`), and why."""


def choices_of(stage: Stage) -> tuple[str, ...]:
    """Those of `CHOICES` that a stage has."""
    return tuple(filter(None, (stage.sharding, "blocks" * stage.by_block)))


def kinds_of_schedule(name: str) -> tuple[str, ...]:
    """The properties of a schedule that choices may exclude.

    >>> kinds_of_schedule("1f1b"), kinds_of_schedule("zb-h1"), kinds_of_schedule("pipedream")
    ((), ('split backwards',), ('no flush',))
    """
    family = FAMILIES.get(name)
    if family is None:
        return ()
    found = {
        "no flush": not family.flushes,
        "split backwards": family.splits,
        "mirrored": family.placement == "mirrored",
    }
    return tuple(kind for kind, has in found.items() if has)


def choice_refusal(choice: str, schedule: str, *, tied: bool = False) -> str:
    """Return why a stage cannot have a choice under a schedule, in words; empty if it can.

    ``choice`` is one of `CHOICES`, thus also what `Stage.sharding` may be, or empty for none.
    ``tied``: it has a parameter that another stage uses.

    >>> choice_refusal("parameters", "1f1b"), choice_refusal("blocks", "zb-h1")
    ('', 'splits backwards: each half would need the activations')
    >>> choice_refusal("parameters", "1f1b", tied=True)
    'has parameters tied between stages: its gradients are summed where it is divided'
    """
    met = {kind: SCHEDULES[kind] for kind in kinds_of_schedule(schedule)}
    if tied:
        met["tied stages"] = "has parameters tied between stages"
    refused = (f"{met[kind]}: {REFUSED[choice, kind]}" for kind in met if (choice, kind) in REFUSED)
    return next(refused, "")
