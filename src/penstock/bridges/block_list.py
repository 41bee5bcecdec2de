"""The transformer blocks of a model, for layouts that count them."""

from itertools import pairwise
from pathlib import Path

from penstock.bridges.module_chain import ModuleChain, module_chain
from penstock.errors import BadInput
from penstock.profile.model_profile import ModelProfile

__all__ = ["stages_of_counts", "transformer_blocks"]


def transformer_blocks(chain: ModuleChain, profile: ModelProfile) -> tuple[int, int]:
    """Where the blocks are in the chain of modules: the first, and the one after the last.

    Raises:
        BadInput: there are none, they are entries of several lists, or others stand between them.
    """
    places = [i for i, module in enumerate(chain.modules) if module.container is not None]
    lists = sorted({chain.modules[i].container or "" for i in places})
    if len(lists) != 1 or places != list(range(places[0], places[-1] + 1)):
        there = f"blocks in {', '.join(map(repr, lists))}" if lists else "no numbered blocks"
        raise BadInput(
            f"profile '{profile.name}' has {there}; this layout needs one list of blocks such as "
            f"'layers.0', 'layers.1', with nothing between them"
        )
    return places[0], places[-1] + 1


def stages_of_counts(counts: list[int], profile: ModelProfile, path: Path) -> tuple[range, ...]:
    """Stages with so many blocks each; the first has all before them, the last all after them.

    Raises:
        BadInput: a stage has no layer.
    """
    chain = module_chain(profile)
    first, last = transformer_blocks(chain, profile)
    bounds, block = [0], first
    for index, count in enumerate(counts[:-1]):
        block += count
        bounds.append(chain.modules[block].layers.start if block < last else ending(chain, last))
        if bounds[-1] <= bounds[-2]:
            raise BadInput(f"{path}: stage {index} has no layer; give it one")
    if bounds[-1] >= len(profile.layers):
        raise BadInput(f"{path}: the last stage has no layer; give it one")
    bounds.append(len(profile.layers))
    return tuple(range(lo, hi) for lo, hi in pairwise(bounds))


def ending(chain: ModuleChain, last: int) -> int:
    """The first layer after the blocks, of which ``last - 1`` is the last."""
    return chain.modules[last - 1].layers.stop
