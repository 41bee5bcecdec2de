"""Pins: parts of a plan that the user fixes, so that only the rest is planned."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.cluster import Cluster
from penstock.errors import BadInput
from penstock.files import parse_toml, read_text
from penstock.plan.plan import Plan
from penstock.profile.model_profile import ModelProfile

Numbers: TypeAlias = NDArray[np.int64]

FORMS = (
    "'LAYERS: alone', 'LAYERS: together', 'LAYERS: stage 2', 'LAYERS: devices 0-3', "
    "'stage 2: devices 0-3', 'stages: 4', 'stages: equal' or 'micro-batch: 8'"
)
"""The forms of a pin, in words."""

NUMBERS = re.compile(r"\d+(-\d+)?(, *\d+(-\d+)?)*")
MOST_DIGITS = 9


@dataclass(frozen=True, slots=True)
class Pin:
    """One part of a plan that is fixed; ``text`` is what the user wrote.

    ``layers`` stand on one stage: ``alone`` there, on the one numbered ``stage``, on exactly
    ``devices``, or only together. Without layers, ``devices`` are those of ``stage``, ``stages`` is
    the number of all stages, ``equal`` requires numbers of layers that differ by at most 1 (stages
    that are alone by a pin do not count), and ``micro_batch_size`` is that of the plan. -1, 0 and
    empty: not fixed.
    """

    text: str
    layers: range = range(0)
    alone: bool = False
    stage: int = -1
    devices: tuple[int, ...] = ()
    stages: int = 0
    equal: bool = False
    micro_batch_size: int = 0


def read_pin(text: str, profile: ModelProfile, cluster: Cluster) -> Pin:
    """A pin as people write it, such as "lm_head: alone".

    Layers are named by their names in the profile, by modules that they are part of, with ``*`` for
    any characters, by numbers (``0-3``), or as ``first`` and ``last``; several with commas between.
    """
    subject, _, value = (part.strip() for part in text.rpartition(":"))
    if subject == "stages" and value == "equal":
        return Pin(text, equal=True)
    if subject in ("stages", "micro-batch") and value.isdecimal() and int(value[:MOST_DIGITS]) > 0:
        count = int(value[:MOST_DIGITS])
        return Pin(text, stages=count) if subject == "stages" else Pin(text, micro_batch_size=count)
    devices = value.removeprefix("devices ") if value.startswith("devices ") else ""
    found = numbers_in_list(devices)
    if found and max(found) >= len(cluster.devices):
        raise BadInput(
            f"pin '{text}' names device {max(found)}, and cluster '{cluster.name}' has devices 0 "
            f"to {len(cluster.devices) - 1}; name those"
        )
    if found and (of_stage := stage_number(subject)) >= 0:
        return Pin(text, stage=of_stage, devices=found)
    stage = stage_number(value)
    if not subject or not (found or stage >= 0 or value in ("alone", "together")):
        raise BadInput(f"pin '{text}' cannot be read; write {FORMS}")
    return Pin(text, layers_named(subject, text, profile), value == "alone", stage, found)


def read_pins(given: Sequence[str]) -> tuple[str, ...]:
    """The texts of pins, where TOML files represent their table ``[pins]``.

    A key is what is pinned, its value how: ``"lm_head" = "alone"``, ``stages = 4``, or a list.
    """
    texts: list[str] = []
    for text in given:
        if not text.endswith(".toml"):
            texts.append(text)
            continue
        table = parse_toml(read_text(text, "pins"), text, "pins").get("pins")
        if not isinstance(table, dict):
            raise BadInput(f"'{text}' has no table [pins]; write one, with lines as 'stages = 4'")
        for key, value in cast(dict[str, object], table).items():
            values = cast(list[object], value) if isinstance(value, list) else [value]
            texts += [f"{key}: {one}" for one in values]
    return tuple(texts)


def stage_number(words: str) -> int:
    """The number in words such as "stage 2"; -1 where they are others."""
    number = words.removeprefix("stage ")
    return int(number) if number != words and number.isdecimal() and len(number) < 7 else -1


def numbers_in_list(text: str) -> tuple[int, ...]:
    """The numbers in a list such as "0-2,5"; none in any other text.

    >>> numbers_in_list("0-2, 5")
    (0, 1, 2, 5)
    """
    if not NUMBERS.fullmatch(text) or max(map(len, re.findall(r"\d+", text))) > 6:
        return ()
    parts = (part.partition("-") for part in text.split(","))
    runs = (range(int(lo), int(hi or lo) + 1) for lo, _, hi in parts)
    return tuple(sorted({number for run in runs for number in run}))


def layers_named(subject: str, text: str, profile: ModelProfile) -> range:
    """The run of layers that ``subject`` names; refused where it is none."""
    count = len(profile.layers)
    found: set[int] = set()
    for part in map(str.strip, subject.split(",")):
        named = {
            index
            for index, layer in enumerate(profile.layers)
            # A published profile has the number of a layer before its name.
            for name in (layer.name, layer.name.partition(" ")[2])
            if name == part or name.startswith(f"{part}.") or fnmatchcase(name, part)
        }
        named = named or {"first": {0}, "last": {count - 1}}.get(part) or set(numbers_in_list(part))
        if not named or max(named) >= count:
            raise BadInput(
                f"pin '{text}': profile '{profile.name}' has no layer '{part}'; its {count} layers "
                f"are '{profile.layers[0].name}' to '{profile.layers[-1].name}', or by number 0 to "
                f"{count - 1}"
            )
        found |= named
    lo, hi = min(found), max(found) + 1
    if len(found) < hi - lo:
        between = min(set(range(lo, hi)) - found)
        raise BadInput(
            f"pin '{text}' names {len(found)} layers from {lo} to {hi - 1}, but not layer "
            f"{between} ('{profile.layers[between].name}') between them; name neighbours, such as "
            f"{lo}-{hi - 1}"
        )
    return range(lo, hi)


def allowed_runs(
    pins: Sequence[Pin], starts: Numbers, stops: Numbers, stage: Numbers, stages: int, layers: int
) -> NDArray[np.bool_]:
    """A mask of the runs of layers that may be a stage of that number (of all ``stages``)."""
    allowed = np.asarray(starts < stops)
    is_alone = np.zeros_like(allowed)
    for pin in pins:
        if not pin.layers:
            continue
        lo, hi = pin.layers.start, pin.layers.stop
        touches = (starts < hi) & (stops > lo)
        holds = (starts <= lo) & (stops >= hi)
        if pin.alone:
            holds &= (starts == lo) & (stops == hi)
            is_alone |= holds
        allowed &= ~touches | holds
        if pin.stage >= 0:
            allowed &= touches == (stage == pin.stage)
    if any(pin.equal for pin in pins):
        alone = {pin.layers for pin in pins if pin.alone}
        free = layers - sum(map(len, alone))
        least = free // max(1, stages - len(alone))
        rest = free % max(1, stages - len(alone))
        sizes = stops - starts
        allowed &= is_alone | (sizes == least) | (bool(rest) & (sizes == least + 1))
    return allowed


def broken_pin(pins: Sequence[Pin], plan: Plan) -> str:
    """The text of a pin that a plan does not keep; empty where it keeps all."""
    stages, layers = plan.stages, plan.stages[-1].layers.stop
    starts = np.array([stage.layers.start for stage in stages])
    stops = np.array([stage.layers.stop for stage in stages])
    places = np.arange(len(stages))
    for pin in pins:
        # What is equal depends on the pins that are alone.
        judged = pins if pin.equal else (pin,)
        kept = pin.stages in (0, len(stages)) and pin.stage < len(stages)
        kept = kept and pin.micro_batch_size in (0, plan.micro_batch_size)
        if not kept or not allowed_runs(judged, starts, stops, places, len(stages), layers).all():
            return pin.text
        if pin.devices and any(
            set(stages[index].devices) != set(pin.devices) for index in stages_of_pin(pin, plan)
        ):
            return pin.text
    return ""


def stages_of_pin(pin: Pin, plan: Plan) -> Iterator[int]:
    """The stages that a pin speaks of: the one of its layers, or the one of its number."""
    yield plan.stage_of_layer(pin.layers.start) if pin.layers else pin.stage


def pins_text(pins: Sequence[Pin]) -> str:
    """Pins in words, as in a message.

    >>> pins_text([Pin("first: alone"), Pin("stages: 4")])
    "pins 'first: alone' and 'stages: 4'"
    """
    names = " and ".join(f"'{pin.text}'" for pin in pins)
    return f"pin{'s' * (len(pins) > 1)} {names}"
