"""Options that commands had once: each is refused in a line that names what to use instead."""

from collections.abc import Sequence

from penstock.errors import BadInput

__all__ = ["REMOVED_OPTIONS", "check_removed_options"]

LAYOUTS = "write the cuts as the split_points of --from torch, or as a layout of --from megatron"

REMOVED = {
    ("rehearse", "--network", ""): "links are always emulated; leave it out",
    ("rehearse", "--fault", ""): "ask 'penstock simulate' with --device and --link-bandwidth",
    ("simulate", "--trace", ""): "write it with --picture trace.json",
    ("import", "--from", "deepspeed"): LAYOUTS,
    ("import", "--from", "huggingface"): LAYOUTS,
    ("import", "--from", "torchtitan"): LAYOUTS,
}
"""By command, option and value (empty: any), where only one command had the option."""

REMOVED_OPTIONS = {
    "--allow-pickle": "checkpoints of format 1 are not read any more: resume with the version that "
    "wrote them, and save the weights with --save-weights",
}
"""By option, whatever the command; asked where an option is unknown."""


def check_removed_options(words: Sequence[str]) -> None:
    """Raise for the first removed option among the words of a command line.

    Raises:
        BadInput: what to use instead.
    """
    command = words[0] if words else ""
    for word, following in zip(words[1:], [*words[2:], ""], strict=False):
        option, equals, value = word.partition("=")
        for chosen in ("", value if equals else following):
            if instead := REMOVED.get((command, option, chosen)):
                what = f"{option} {chosen}".rstrip()
                raise BadInput(f"penstock {command} has no {what} any more: {instead}")
