"""Finds a part of the user's model in the stages that it was cut into."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from torch import nn

from penstock.capture.layer_graph import LayerGraph, StageProgram
from penstock.errors import BadInput
from penstock.words import numbered

__all__ = ["module_for"]


def module_for(
    name: str,
    graph: LayerGraph,
    programs: Mapping[int, StageProgram],
    holders: Mapping[str, tuple[int, ...]],
    rank: int,
) -> nn.Module:
    """The module in ``programs`` that holds ``name``, a part of the model.

    ``name`` is a submodule, parameter or buffer of the model. ``holders[tensor]`` are the ranks
    that hold a parameter or buffer, by its first name.

    Raises:
        BadInput: the name is unknown, has no parameters or buffers, or is on other ranks.
    """
    first = graph.tied_names.get(name, name)
    below = f"{first}."
    wanted = [held for held in holders if held == first or held.startswith(below)]
    if not wanted:
        near = get_close_matches(name, sorted(known_names({*holders, *graph.tied_names})), n=1)
        hint = f"did you mean '{near[0]}'?" if near else "see model.named_parameters()"
        raise BadInput(
            f"the model has no parameter or buffer '{name}', and no module of that name with any; "
            f"{hint}"
        )
    path = first.rpartition(".")[0] if wanted == [first] else first
    for program in programs.values():
        own = {n for n, _ in (*program.module.named_parameters(), *program.module.named_buffers())}
        if own & {*wanted, *(other for other, n in graph.tied_names.items() if n in wanted)}:
            return program.module.get_submodule(path)
    ranks = sorted({holder for held in wanted for holder in holders[held]})
    raise BadInput(f"'{name}' is held by {numbered('rank', ranks)}, not by rank {rank}; ask there")


def known_names(tensors: Iterable[str]) -> set[str]:
    """The names of ``tensors`` and of the modules that contain them."""
    parts = [name.split(".") for name in tensors]
    return {".".join(path[:k]) for path in parts for k in range(1, len(path) + 1)}
