"""A model with its smallest layers left out, for bounds.

*Lemma (leaving a layer out).* Give each layer the devices that a plan computes it on. Delete a
layer: its work, its parameters, its tensors. What is left takes no more of anything, and each
message that is left over passed in the plan too. So what no shortened chain can do within a time,
no plan can. Where a deleted layer read a tensor of ``p`` and ``c`` read one of its own, ``p`` and
``c`` on different devices have one of the two between them: the smaller one is kept as a tensor
from ``p`` to ``c``. ∎

Layers without work would else be stages that pass messages on for nothing, or that count as the
first work of devices which then wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from penstock.profile.model_profile import Affine, Edge, ModelProfile

__all__ = ["PrefixSums", "ShortenedChain", "Tensor", "floor_of", "goes_whole", "shortened"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Tensor:
    """What is sent of a layer to later ones, and comes back; ``whole``: each reader gets it all."""

    producer: int
    consumers: tuple[int, ...]
    bytes: Affine
    gradient_bytes: Affine
    whole: bool


@dataclass(frozen=True)
class PrefixSums:
    """A cost summed over the layers before each cut, its fixed part and that of each row."""

    fixed: Floats
    per_row: Floats

    def of_runs(self) -> "PrefixSums":
        """The cost of every run of layers: first layer, and the cut after the last."""
        return PrefixSums(
            self.fixed[None, :] - self.fixed[:, None], self.per_row[None, :] - self.per_row[:, None]
        )


@dataclass(frozen=True)
class ShortenedChain:
    """The layers that are left: sums at each cut before one of them, and at the end.

    ``forward``, ``inputs`` and ``work`` (both halves of the backward and the forward) are of the
    layers left; ``way_down`` and ``way_up`` of all, since a row passes the deleted ones as well.
    """

    layers: tuple[int, ...]
    forward: PrefixSums
    inputs: PrefixSums
    work: PrefixSums
    way_down: PrefixSums
    way_up: PrefixSums
    saved: PrefixSums
    parameter_bytes: Floats
    buffer_bytes: Floats
    tensors: tuple[Tensor, ...]


def shortened(
    profile: ModelProfile, share: float, most_rows: int, *, whole: bool = False
) -> ShortenedChain:
    """``profile`` without the layers of least work, together at most ``share`` of all of it.

    Where backwards are ``whole``, what passes a gradient on is all of them, not the input half.
    """
    costs = profile.layers
    forward = floors([cost.forward_s for cost in costs], most_rows)
    passing = [cost.backward_s if whole else cost.backward_input_s for cost in costs]
    inputs = floors(passing, most_rows)
    work = floors([cost.forward_s + cost.backward_s for cost in costs], most_rows)
    seconds = np.array([cost.at(most_rows) for cost in work])
    tensors, left, out_s = tensors_of(profile, most_rows), set(range(len(costs))), 0.0
    for layer in np.argsort(seconds, kind="stable").tolist():
        out_s += seconds[layer]
        if out_s > share * seconds.sum() or len(left) == 1:
            break
        left.remove(layer)
        tensors = without(tensors, layer)
    layers = sorted(left)
    place = {layer: index for index, layer in enumerate(layers)}
    cuts = [0, *layers[1:], len(costs)]
    return ShortenedChain(
        layers=tuple(layers),
        forward=sums([forward[i] for i in layers]),
        inputs=sums([inputs[i] for i in layers]),
        work=sums([work[i] for i in layers]),
        way_down=at_cuts(sums(forward), cuts),
        way_up=at_cuts(sums(inputs), cuts),
        saved=sums(floors([costs[i].saved_bytes for i in layers], most_rows)),
        parameter_bytes=running([costs[i].parameter_bytes for i in layers]),
        buffer_bytes=running([costs[i].buffer_bytes for i in layers]),
        tensors=tuple(
            Tensor(
                place[tensor.producer],
                tuple(place[reader] for reader in tensor.consumers),
                tensor.bytes,
                tensor.gradient_bytes,
                tensor.whole,
            )
            for tensor in tensors
        ),
    )


def tensors_of(profile: ModelProfile, most_rows: int) -> list[Tensor]:
    """Every tensor with all its readers; a whole one's bytes do not grow with the rows."""
    made: dict[str, Tensor] = {}
    for edge in profile.edges:
        whole = goes_whole(edge)
        size, gradient = (floor_of(cost, most_rows) for cost in (edge.bytes, edge.gradient_bytes))
        if whole:
            gradient = Affine(gradient.at(1))
        known = made.get(edge.tensor)
        readers = {edge.consumer, *(known.consumers if known else ())}
        made[edge.tensor] = Tensor(edge.producer, tuple(sorted(readers)), size, gradient, whole)
    return list(made.values())


def goes_whole(edge: Edge) -> bool:
    """Whether a tensor is not cut by rows (see `penstock.simulate.transfers`)."""
    return edge.bytes.fixed > 0 and edge.bytes.per_sample == 0


def without(tensors: Sequence[Tensor], layer: int) -> list[Tensor]:
    """The tensors that are left when ``layer`` is deleted, the widest ways through it kept.

    A tensor that others read too is led on as one, since one message may have been for both; what
    it has more than the one made of it goes to the others only.
    """
    kept = [t for t in tensors if t.producer != layer and layer not in t.consumers]
    read = sorted((t for t in tensors if layer in t.consumers), key=width, reverse=True)
    made = sorted((t for t in tensors if t.producer == layer), key=width, reverse=True)
    for above, below in zip_longest(read, made[: len(read)]):
        others = tuple(reader for reader in above.consumers if reader != layer)
        rest = replace(above, consumers=others)
        if below:
            through = Tensor(
                above.producer,
                tuple(sorted({*others, *below.consumers})),
                lesser(above.bytes, below.bytes),
                lesser(above.gradient_bytes, below.gradient_bytes),
                above.whole or below.whole,
            )
            kept.append(through)
            rest = replace(
                rest,
                bytes=above.bytes + through.bytes.scaled(-1.0),
                gradient_bytes=above.gradient_bytes + through.gradient_bytes.scaled(-1.0),
            )
        if others and width(rest) > 0:
            kept.append(rest)
    return kept


def width(tensor: Tensor) -> float:
    """What a row and a message of it take, there and back."""
    both = tensor.bytes + tensor.gradient_bytes
    return both.fixed + both.per_sample


def lesser(one: Affine, other: Affine) -> Affine:
    """A cost that neither is below."""
    return Affine(min(one.fixed, other.fixed), min(one.per_sample, other.per_sample))


def floor_of(cost: Affine, most_rows: int) -> Affine:
    """A cost that for 1 to ``most_rows`` rows is not above ``cost``, and never falls.

    Fitted costs may have a negative term: ``-1 + 3 n`` is at least ``2 n``, and ``9 - n`` at least
    its last.

    >>> floor_of(Affine(-1.0, 3.0), 8)
    Affine(fixed=0.0, per_sample=2.0)
    """
    if cost.fixed < 0:
        return Affine(0.0, max(0.0, cost.at(1)))
    if cost.per_sample < 0:
        return Affine(max(0.0, cost.at(most_rows)), 0.0)
    return cost


def floors(costs: Sequence[Affine], most_rows: int) -> list[Affine]:
    """`floor_of` each."""
    return [floor_of(cost, most_rows) for cost in costs]


def sums(costs: Sequence[Affine]) -> PrefixSums:
    """The sums before each cut."""
    return PrefixSums(running([c.fixed for c in costs]), running([c.per_sample for c in costs]))


def at_cuts(all_sums: PrefixSums, cuts: Sequence[int]) -> PrefixSums:
    """The sums at some of the cuts."""
    return PrefixSums(all_sums.fixed[cuts], all_sums.per_row[cuts])


def running(values: Sequence[float]) -> Floats:
    """Sums of the first 0, 1, ... values."""
    return np.concatenate(([0.0], np.cumsum(np.array(values, dtype=np.float64))))
