"""Several kinds of batches: one record for each, cut into the same layers of the same modules.

first kind    words | picture.0 | picture.1 | block.0 | block.1 | loss
other kind    words |           |           | block.0 | block.1 | loss        two layers are empty
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from penstock.capture.batch.layout import entry_at
from penstock.capture.batch.part import LeafKey
from penstock.capture.contract import Batch
from penstock.capture.layer_graph import LayerGraph
from penstock.errors import BadInput

T = TypeVar("T")


def joined_graph(graphs: Sequence[LayerGraph], examples: Sequence[Batch]) -> LayerGraph:
    """One graph for batches of all kinds; its layers, costs and sizes are those of the first.

    Where another kind cannot be cut between the same modules, the first is not cut either.
    """
    first, *others = graphs
    cut, cuts = first.cut, [other.cut for other in others]
    places = {n: [own.place_of(n, cut) for own in cuts] for n in range(1, len(cut.names))}
    kept = [n for n, found in places.items() if None not in found]
    names = [cut.names[n] for n in (0, *kept)]
    for number, own in enumerate(cuts):
        own.set_layers(names, [0, *(places[n][number] or 0 for n in kept), own.end])
    cut.set_layers(names, [0, *(cut.bounds[n] for n in kept), cut.end])
    for own in (cut, *cuts):
        own.kinds = (cut, *cuts)
    found = replace(first, others=tuple(others))
    for number, example in enumerate(examples):
        if kind_of_batch(found, example) != number:
            raise BadInput(
                f"examples {kind_of_batch(found, example)} and {number} have the same keys and "
                f"constants, so batches do not show of which kind they are; leave one out"
            )
    return found


def named_in(
    named: Mapping[LeafKey, T] | None, example: Batch, every: Sequence[Batch]
) -> dict[LeafKey, T]:
    """Return ``named`` without keys that the example lacks and other kinds of batches have."""
    return {
        key: value
        for key, value in (named or {}).items()
        if entry_at(example, key) is not None or all(entry_at(b, key) is None for b in every)
    }


def kind_of_batch(graph: LayerGraph, batch: Batch, *, for_outputs: bool = False) -> int:
    """The number of the kind of a batch: the first whose example it is like.

    Batches ``for_outputs`` may lack what is not read for these; they are of the kind that knows
    most of what they have.
    """
    if not graph.others:
        return 0
    found, problems = dict[int, int](), list[BadInput]()
    for number, kind in enumerate(graph.kinds):
        try:
            leaves = kind.known_leaves(batch) if for_outputs else kind.layout.flatten(batch)
            found[number] = len(leaves)
        except BadInput as problem:
            problems.append(problem)
    if found:
        return max(found, key=lambda number: found[number])
    for kind, problem in zip(graph.kinds, problems, strict=True):
        if batch_keys_in_words(batch) == batch_keys_in_words(kind.layout.structure):
            raise problem
    examples = " and ".join(
        {batch_keys_in_words(kind.layout.structure): None for kind in graph.kinds}
    )
    raise BadInput(
        f"the batch has {batch_keys_in_words(batch)}, and the examples have {examples}; give a "
        f"batch like it at capture, too: other_examples=[..., batch]"
    )


def batch_keys_in_words(batch: Any) -> str:
    """The keys of a batch in words."""
    if isinstance(batch, Mapping):
        return f"the keys {sorted(map(str, batch))}"  # pyright: ignore
    return f"{len(batch)} entries" if isinstance(batch, list | tuple) else "one entry"  # pyright: ignore
