"""Layouts of Megatron-LM: the string of ``--pipeline-model-parallel-layout``, with its arguments.

Source of the format: NVIDIA/Megatron-LM, August 2026,
``megatron/core/transformer/pipeline_parallel_layer_layout.py``. Stages are divided by ``|``. ``E``
is the embedding, ``t`` a transformer layer, ``m`` a layer that predicts further tokens, ``L`` the
loss with the head. ``x*n`` and ``(...)*n`` repeat; commas mean nothing:

    Et*3|t*4|t*4|t*3L

Stage ``s`` is on rank ``s % pipeline_size``. ``E`` means the profile's layers before the first
block, ``L`` those after the last. Megatron holds each of the two on one stage.
"""

import re
import shlex
from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise
from pathlib import Path

from penstock.errors import BadInput
from penstock.files import read_text, shorter
from penstock.integrations.bridges.layout import LayoutOptions, PipelineLayout
from penstock.integrations.bridges.modules import ModuleLayers, NamedPlan, module_chain
from penstock.profile.model_profile import ModelProfile
from penstock.schedule.shape import looped

TARGET = "Megatron-LM"
GROUP, SINGLE = re.compile(r"\(([^)]+)\)\*(\d{1,9})"), re.compile(r"(.)\*(\d{1,9})")
LONGEST = 100_000
"""The most characters of a layout without repetitions."""

NUMBERS = ("pipeline-model-parallel-size", "num-layers", "micro-batch-size", "global-batch-size")
LAYOUT = "pipeline-model-parallel-layout"
OWN_SCHEDULES = ("1f1b", "interleaved")


def megatron_arguments(given: NamedPlan) -> tuple[str, list[str]]:
    """The arguments of Megatron-LM, one on each line, and notes."""
    layout, chain = given.layout, given.chain
    first, last = transformer_blocks(chain, given.profile)
    if not layout.is_looped:
        raise BadInput(
            f"the stages of schedule '{layout.schedule}' are on ranks {list(layout.ranks)}; "
            f"{TARGET} puts them round after round; plan with --schedule 1f1b or interleaved"
        )
    letters: list[str] = []
    position = 0
    for modules in given.modules:
        own = range(position, position + len(modules))
        position = own.stop
        check_cut(chain, own.stop, first, last)
        head = "E" if 0 in own else ""
        tail = "L" if own.stop == len(chain) else ""
        blocks = sum(first <= i < last for i in own)
        letters.append(head + (f"t*{blocks}" if blocks > 1 else "t" * blocks) + tail)
    arguments = {
        "num-layers": last - first,
        "pipeline-model-parallel-size": layout.pipeline_size,
        LAYOUT: "|".join(letters),
        "micro-batch-size": layout.rows,
        "global-batch-size": layout.micro_batches * layout.rows * layout.replicas,
    }
    if layout.group_size > 1:
        arguments["tensor-model-parallel-size"] = layout.group_size
    if given.expert_size > 1:
        arguments["expert-model-parallel-size"] = given.expert_size
    own_order = f"{TARGET} runs 1F1B, or its interleaved form, and not the plan's"
    notes = [] if layout.schedule in OWN_SCHEDULES else [f"{own_order} '{layout.schedule}'"]
    text = "".join(f"--{name} {shlex.quote(str(value))}\n" for name, value in arguments.items())
    return text, notes


def check_cut(chain: Sequence[ModuleLayers], cut: int, first: int, last: int) -> None:
    """Raise `BadInput` if a cut before module ``cut`` divides the embedding or the head."""
    if first <= cut <= last or cut == len(chain):
        return
    before, after = chain[cut - 1].name, chain[cut].name
    what = "embedding" if cut < first else "head"
    raise BadInput(
        f"the cut between '{before}' and '{after}' divides what {TARGET} keeps together as its "
        f"{what}; change the layers of the two stages in the plan"
    )


def read_megatron_arguments(
    path: Path, profile: ModelProfile, options: LayoutOptions
) -> PipelineLayout:
    """The layout in a file of Megatron-LM's arguments, or of the layout string alone."""
    found = layout_arguments(path)
    layers = ["".join(stage) for stage in unrolled(found[LAYOUT], path).split("|")]
    check_letters(layers, path)
    numbers = {name: number_argument(found, name, path) for name in NUMBERS}
    first, last = transformer_blocks(module_chain(profile), profile)
    counts = [stage.count("t") for stage in layers]
    for count, source in ((sum(counts), "the layout"), (numbers["num-layers"], "--num-layers")):
        if count and count != last - first:
            raise BadInput(
                f"{path}: {source} has {count} transformer layers, and profile "
                f"'{profile.name}' has {last - first} blocks; is it the layout of another model?"
            )
    size = options.ranks or numbers["pipeline-model-parallel-size"] or len(layers)
    if len(layers) % size:
        raise BadInput(
            f"{path}: {len(layers)} stages cannot be divided among {size} ranks; name a multiple "
            f"of {size} stages, or another number with --ranks"
        )
    rows, batch = numbers["micro-batch-size"], numbers["global-batch-size"]
    replicas = options.replicas or 1
    return PipelineLayout(
        stages_of_counts(counts, profile, path),
        looped(size, len(layers) // size),
        replicas,
        batch // (rows * replicas) if rows else 0,
        rows,
        "1f1b" if len(layers) == size else "interleaved",
    )


def layout_arguments(path: Path) -> dict[str, str]:
    """The arguments of a file that a layout has; a text without any is the layout itself."""
    text = read_text(path, "layout")
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise BadInput(f"{path} is no list of arguments: {error}; correct it") from None
    found: dict[str, str] = {}
    for index, word in enumerate(words):
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in (LAYOUT, *NUMBERS):
            continue
        found[name] = value if equals else "".join(words[index + 1 : index + 2])
    if LAYOUT not in found and len(text.split()) == 1:
        found[LAYOUT] = "".join(words)
    if not found.get(LAYOUT):
        raise BadInput(
            f"{path} has no --{LAYOUT}; name a file with that argument, or with the layout "
            f"alone, such as 'Et*3|t*3L'"
        )
    return found


def number_argument(found: dict[str, str], name: str, path: Path) -> int:
    """The number that an argument has; 0 where it is not given."""
    text = found.get(name, "0")
    if not re.fullmatch(r"\d{1,9}", text) or (name in found and int(text) < 1):
        raise BadInput(f"{path}: --{name} is {shorter(text)!r}; give a number >= 1")
    return int(text)


def unrolled(text: str, path: Path) -> str:
    """The layout without repetitions and commas."""
    plain = text.replace(",", "")
    for pattern in (GROUP, SINGLE):
        longest = sum(len(m[1]) * int(m[2]) for m in pattern.finditer(plain))
        if len(plain) + longest > LONGEST:
            raise BadInput(f"{path}: the layout has more than {LONGEST} letters; shorten it")
        plain = pattern.sub(lambda match: match[1] * int(match[2]), plain)
    return plain


def check_letters(layers: list[str], path: Path) -> None:
    """Raise `BadInput` unless there is one E, then blocks, then one L."""
    flat = "".join(layers)
    if "m" in flat:
        raise BadInput(
            f"{path}: the layout has a layer 'm' (multi-token prediction), which no profile has; "
            f"leave it out to compare the rest"
        )
    unknown = next((letter for letter in flat if letter not in "EtL"), None)
    if unknown is not None:
        raise BadInput(
            f"{path}: letter '{unknown}' of the layout is unknown; they are E, t, m and L"
        )
    if not re.fullmatch("Et*L", flat):
        shown = "".join(letter * min(2, len(list(run))) for letter, run in groupby(flat))
        raise BadInput(
            f"{path}: the layers of the layout are {shorter(shown)!r}; it begins with its only E "
            f"and ends with its only L"
        )
    if not all(layers):
        raise BadInput(f"{path}: stage {layers.index('')} of the layout is empty; give it a layer")


def transformer_blocks(chain: Sequence[ModuleLayers], profile: ModelProfile) -> tuple[int, int]:
    """Indices of the blocks in the chain of modules: the first, and the one after the last."""
    places = [i for i, module in enumerate(chain) if module.container is not None]
    lists = sorted({chain[i].container or "" for i in places})
    if len(lists) != 1 or places != list(range(places[0], places[-1] + 1)):
        there = f"blocks in {', '.join(map(repr, lists))}" if lists else "no numbered blocks"
        raise BadInput(
            f"profile '{profile.name}' has {there}; this layout needs one list of blocks such as "
            f"'layers.0', 'layers.1', with nothing between them"
        )
    return places[0], places[-1] + 1


def stages_of_counts(counts: list[int], profile: ModelProfile, path: Path) -> tuple[range, ...]:
    """Stages with ``counts`` blocks; the first has all before them, the last all after them."""
    chain = module_chain(profile)
    first, _ = transformer_blocks(chain, profile)
    starts = [0, *(module.layers.stop for module in chain)]
    cuts = [starts[block] for block in accumulate(counts[:-1], initial=first)][1:]
    bounds = [0, *cuts, len(profile.layers)]
    for index, (lo, hi) in enumerate(pairwise(bounds)):
        if hi <= lo:
            which = f"stage {index}" if index < len(cuts) else "the last stage"
            raise BadInput(f"{path}: {which} has no layer; give it one")
    return tuple(range(lo, hi) for lo, hi in pairwise(bounds))
