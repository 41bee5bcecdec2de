"""Draws changed command lines of every ``penstock`` command, each from its number alone."""

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin

__all__ = ["GOOD", "Line", "line_of"]

MOST_CHANGES = 3

GOOD: dict[str, Sequence[Sequence[str]]] = {
    "plan": (
        ("plan", "profile.json", "--cluster=cluster.toml", "--batch=16", "--time-limit=0.2"),
        ("plan", "graph.txt", "--profile-batch=64", "--cluster=cluster.toml", "--batch=8"),
    ),
    "simulate": (("simulate", "plan.json"), ("simulate", "plan.json", "--micro-batches=8")),
    "compare": (
        ("compare", "profile.json", "--cluster=cluster.toml", "--batch=16", "--planners=dapple"),
    ),
    "choose": (
        ("choose", "profile.json", "--clusters=cluster.toml", "--batch=16", "--samples=1e6"),
    ),
    "profile": (("profile", "job.toml", "--estimate=H100-80GB"),),
    "train": (
        ("train", "job.toml", "--workers=2", "--plan=misfit.json"),
        ("train", "job.toml", "--workers=2"),
        ("train", "job.toml", "--resume", "--out=run"),
    ),
    "verify": (("verify", "job.toml", "--plan=misfit.json"), ("verify", "job.toml")),
    "report": (("report", "run"),),
    "list": (("list",),),
}
"""For each command lines that it carries out quickly, or refuses before any worker starts."""

NUMBERS: Sequence[str] = (
    *("0", "-1", "1", "2", "7", "16", "1e3", "0.5", "-0.0", "1e-320", "1e308", "-1e308", "1e400"),
    *("nan", "inf", "-inf", "9" * 20, "-" + "9" * 20, "9" * 5000, "0x10", "1_0", "00", "+4", "--5"),
    *("65536", "720720000", "1000000007", "2147483648", "9223372036854775808", "true", "1,2"),
    *("\u0663", "\uff11", "1.0", "1 ", "", " "),
)
TEXTS: Sequence[str] = (
    *("", " ", "x" * 300, "x" * 5000, "a\nb", "a\x00b", "\x1b[31mred", "\udcff", "\u202e\u00e9"),
    *(
        "\U0001f600",
        "../../up",
        "-",
        "--",
        "-o",
        "@file",
        "~",
        "*",
        "%s",
        "{0}",
        "$HOME",
        ",",
        ",,",
    ),
    *(
        "a,b",
        "auto,auto",
        "None",
        "\r",
        "\t",
        "[bold]x[/bold]",
        "[/nope]",
        "\\",
        "'",
        '"',
        "\u2028",
    ),
)
NEAR: Sequence[str] = (
    *(
        "serach",
        "Search",
        "dappel",
        "bert-49",
        "dapple-z",
        "gpt-txt",
        "1F1B",
        "1f1",
        "gpip",
        "H100",
    ),
    *("x0", "x-1", "x1e400", "xnan", "10GB/s", "10 parsecs", "1e5000000 GB/s", "3 slower 20 %"),
    *("0 slower 100 %", "0 slower 1e9 %", "0 faster 5 %", "1 slower", "9" * 400 + " slower 1 %"),
)
PATHS: Sequence[str] = (
    *("absent.json", "folder", "empty", "unreadable.json", "binary", "plan.json", "cluster.toml"),
    *("profile.json", "job.toml", "graph.txt", "schedule.txt", "raises.toml", "run"),
    *("broken", ".", "..", "folder/absent/x.json", "profile.json/x", "/dev/null", "/dev/full"),
    *("/dev/zero", "/proc/self/mem", "x" * 300 + ".json", "loop", "dangling", "a\x00b", "\udcff"),
    *("profile.json\n", "job.TOML", "~/x", "exits.toml", "locked/x.json", "/proc/version"),
)
PLACES: Sequence[str] = (
    *("new.json", "new.svg", "new.png", "new.html", "new.txt", "new.pdf", ".svg", "new", "folder"),
    *("folder/new.json", "empty", "link.json", "dangling", "loop", "locked/x.json", "/dev/null"),
    *("/dev/full", "/proc/version", "absent/x.json", "profile.json/x", "x" * 300 + ".json", "."),
    *("a\x00b", "\udcff.json", "\udcff.svg", "new\n.json", "", " ", "x" * 5000, "\u202e.json"),
)
VALID: dict[str, Sequence[str]] = {
    "--planner": ("search", "dapple", "spp", "bapipe", "pipedream", "data-parallel", "exact"),
    "--planners": ("dapple,spp", "search", "bapipe"),
    "--schedule": ("1f1b", "gpipe", "auto", "any", "whole-backwards", "1f1b,gpipe"),
    "--schedules": ("1f1b", "gpipe", "auto", "1f1b,gpipe"),
    "--link-bandwidth": ("x0.5", "10GB/s", "2x"),
    "--link-latency": ("x2", "5us"),
    "--device": ("1 slower 20 %", "cpu", "cuda"),
    "--estimate": ("H100-80GB", "V100-16GB", "cpu"),
    "--batch": ("16", "8", "32"),
    "--cluster": ("cluster.toml",),
    "--profile": ("profile.json",),
    "--memory-reserve": ("0.1", "0", "0.99"),
    "--picture": ("new.svg", "new.html", "new.txt", "new.json"),
}
"""Values that options take, so that lines go deeper."""

PLACE_OPTIONS = frozenset({"--out", "-o", "--picture", "--save-weights"})
FILE_WORDS = frozenset({"JOB", "PROFILE", "PLAN", "RUN_DIR", "P", "C"})


@dataclass(frozen=True)
class Line:
    """A command line: the words after ``penstock``, its command, and the kinds of its changes."""

    words: tuple[str, ...]
    command: str
    changes: tuple[str, ...] = ()


def line_of(number: int, commands: dict[str, Any]) -> Line:
    """Line ``number``; ``commands`` are those of the command line's own tree, by name."""
    draw = random.Random(number)
    name = draw.choice(sorted(GOOD))
    line = Line(tuple(draw.choice(GOOD[name])), name)
    for _ in range(draw.randint(1, MOST_CHANGES)):
        kind = draw.choice(sorted(CHANGES))
        words = CHANGES[kind](line.words, commands[name], draw)
        line = replace(line, words=words, changes=(*line.changes, kind))
    return line


Words = tuple[str, ...]


def value_for(option: Any, draw: random.Random) -> str:
    """A value for an option or argument: for two thirds of the draws one of its own type."""
    own: Sequence[str] = next((VALID[name] for name in option.opts if name in VALID), ())
    kind = option.type_descriptor.annotation
    if PLACE_OPTIONS & {*option.opts}:
        own = PLACES
    elif kind in (int, float):
        own = (*own, *NUMBERS)
    elif get_origin(kind) is Literal:
        own = (*own, *get_args(kind))
    elif option.metavar in FILE_WORDS:
        own = (*own, *PATHS)
    every = (NUMBERS, TEXTS, NEAR, PATHS)
    return draw.choice(own if own and draw.random() < 0.7 else draw.choice(every))


def options_of(command: Any) -> list[Any]:
    """The options of a command, without help."""
    return [found for found in command.params if found.param_type_name == "option"]


def written(name: str, value: str, draw: random.Random) -> Words:
    """An option with its value, as one word or as two."""
    joined = f"{name}={value}" if name.startswith("--") else f"{name}{value}"
    return (joined,) if draw.random() < 0.7 else (name, value)


def option_added(words: Words, command: Any, draw: random.Random) -> Words:
    """One more option, perhaps one that is there already, with a value."""
    option = draw.choice(options_of(command))
    name = draw.choice(option.opts)
    return (*words, *((name,) if option.is_flag else written(name, value_for(option, draw), draw)))


def value_changed(words: Words, command: Any, draw: random.Random) -> Words:
    """Another value for an option that is there."""
    places = [index for index, word in enumerate(words) if word.startswith("--") and "=" in word]
    if not places:
        return option_added(words, command, draw)
    place = draw.choice(places)
    name = words[place].partition("=")[0]
    option = next((found for found in options_of(command) if name in found.opts), None)
    value = value_for(option, draw) if option else draw.choice(TEXTS)
    return (*words[:place], f"{name}={value}", *words[place + 1 :])


def argument_changed(words: Words, command: Any, draw: random.Random) -> Words:
    """Another argument."""
    arguments = [found for found in command.params if found.param_type_name == "argument"]
    if not arguments or len(words) < 2:
        return (*words, draw.choice(PATHS))
    return (words[0], value_for(arguments[0], draw), *words[2:])


def word_dropped(words: Words, command: Any, draw: random.Random) -> Words:
    """One word less; the command stays."""
    place = draw.randrange(1, len(words)) if len(words) > 1 else 0
    return words[:place] + words[place + 1 :] if place else words


def word_doubled(words: Words, command: Any, draw: random.Random) -> Words:
    """One word twice."""
    place = draw.randrange(len(words))
    return (*words[: place + 1], *words[place:])


def words_swapped(words: Words, command: Any, draw: random.Random) -> Words:
    """Words in another order."""
    return tuple(draw.sample(words, len(words)))


def value_lost(words: Words, command: Any, draw: random.Random) -> Words:
    """An option without its value."""
    option = draw.choice(options_of(command))
    return (*words, draw.choice(option.opts))


def name_misspelt(words: Words, command: Any, draw: random.Random) -> Words:
    """A letter of a word is another, or missing, or there twice."""
    place = draw.randrange(len(words))
    word = words[place]
    at = draw.randrange(len(word)) if word else 0
    letter = draw.choice((*string.ascii_lowercase, "", word[at : at + 1] * 2, "\x07", "\u00fc"))
    return (*words[:place], word[:at] + letter + word[at + 1 :], *words[place + 1 :])


def word_added(words: Words, command: Any, draw: random.Random) -> Words:
    """A word that belongs nowhere."""
    place = draw.randint(0, len(words))
    word = draw.choice(
        (*TEXTS, "--unknown", "--unknown=1", "-x", "--batc=3", "-h", "--help", "plan")
    )
    return (*words[:place], word, *words[place:])


def printed_otherwise(words: Words, command: Any, draw: random.Random) -> Words:
    """Another way to print."""
    return (*words, draw.choice(("--json", "--quiet", "--json=1", "--no-json", "--quiet=x")))


CHANGES = {
    change.__name__: change
    for change in (
        option_added,
        value_changed,
        argument_changed,
        word_dropped,
        word_doubled,
        words_swapped,
        value_lost,
        name_misspelt,
        word_added,
        printed_otherwise,
    )
}
"""The kinds of changes."""
