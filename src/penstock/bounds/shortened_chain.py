"""A model with its smallest layers left out, for bounds.

*Lemma (leaving a layer out).* Give each layer the devices on which a plan computes it. Delete a
layer: its work, its parameters, its tensors. The rest needs no more of any resource, and every
message of the rest was sent in the plan too. So if no shortened chain fits within a time, no plan
does. Suppose the deleted layer read a tensor of ``p``, and ``c`` read one of its own. If ``p`` and
``c`` are on different devices, one of the two tensors passes between devices: the smaller one is
kept as a tensor from ``p`` to ``c``. ∎

Otherwise layers without work could be stages that only pass messages on, or count as the first work
of devices that then wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest

import numpy as np

from penstock.plan.run_tables import Floats, of_runs, prefix_sums
from penstock.profile.model_profile import Affine, ModelProfile

__all__ = ["PrefixSums", "ShortenedChain", "Tensor", "floor_of", "shortened"]


@dataclass(frozen=True)
class Tensor:
    """A tensor that later layers read, and its gradient; ``whole``: see `Edge.goes_whole`."""

    producer: int
    consumers: tuple[int, ...]
    bytes: Affine
    gradient_bytes: Affine
    whole: bool


@dataclass(frozen=True)
class PrefixSums:
    """A cost summed over the layers before each cut: its fixed part, and its part for each row."""

    fixed: Floats
    per_row: Floats

    @cached_property
    def runs(self) -> "PrefixSums":
        """The cost of every run of layers: first layer, and the cut after the last."""
        return PrefixSums(of_runs(self.fixed), of_runs(self.per_row))


@dataclass(frozen=True)
class ShortenedChain:
    """The layers that are left, with the sums of their costs at the cuts between them.

    ``work`` is forward and backward. ``all_forward`` and ``all_input_backward`` sum over all
    layers, since a row passes the deleted ones too.
    """

    layers: tuple[int, ...]
    forward: PrefixSums
    input_backward: PrefixSums
    work: PrefixSums
    all_forward: PrefixSums
    all_input_backward: PrefixSums
    saved: PrefixSums
    parameter_bytes: Floats
    buffer_bytes: Floats
    tensors: tuple[Tensor, ...]


def shortened(
    profile: ModelProfile, share: float, most_rows: int, *, whole: bool = False
) -> ShortenedChain:
    """``profile`` without the layers of least work, which are at most ``share`` of all work.

    Where backwards are ``whole``, ``input_backward`` is all of a backward, not only the part for
    the inputs: the gradient is passed on at its end.
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
        input_backward=sums([inputs[i] for i in layers]),
        work=sums([work[i] for i in layers]),
        all_forward=at_cuts(sums(forward), cuts),
        all_input_backward=at_cuts(sums(inputs), cuts),
        saved=sums(floors([costs[i].saved_bytes for i in layers], most_rows)),
        parameter_bytes=prefix_sums([costs[i].parameter_bytes for i in layers]),
        buffer_bytes=prefix_sums([costs[i].buffer_bytes for i in layers]),
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
    """Every tensor with all its readers; the bytes of a whole one do not grow with the rows."""
    made: dict[str, Tensor] = {}
    for edge in profile.edges:
        whole = edge.goes_whole
        size, gradient = (floor_of(cost, most_rows) for cost in (edge.bytes, edge.gradient_bytes))
        if whole:
            gradient = Affine(gradient.at(1))
        known = made.get(edge.tensor)
        readers = {edge.consumer, *(known.consumers if known else ())}
        made[edge.tensor] = Tensor(edge.producer, tuple(sorted(readers)), size, gradient, whole)
    return list(made.values())


def without(tensors: Sequence[Tensor], layer: int) -> list[Tensor]:
    """The tensors that are left when ``layer`` is deleted.

    The largest tensors read by the layer are joined with the largest that it made. A tensor that
    other layers read too stays one tensor, since one message may have served both. The bytes that
    it has beyond the joined tensor go to the other readers only.
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
    """The bytes of a row and of the fixed part, of tensor and gradient."""
    both = tensor.bytes + tensor.gradient_bytes
    return both.fixed + both.per_sample


def lesser(one: Affine, other: Affine) -> Affine:
    """A cost that is above neither."""
    return Affine(min(one.fixed, other.fixed), min(one.per_sample, other.per_sample))


def floor_of(cost: Affine, most_rows: int) -> Affine:
    """A cost without negative terms that for 1 to ``most_rows`` rows is not above ``cost``.

    Fitted costs may have a negative term: ``-1 + 3 n`` is at least ``2 n``, and ``9 - n`` is at
    least its value for the most rows.

    >>> floor_of(Affine(-1.0, 3.0), 8)
    Affine(fixed=0.0, per_sample=2.0)
    """
    if cost.fixed < 0:
        return Affine(0.0, max(0.0, cost.at(1)))
    if cost.per_sample < 0:
        return Affine(max(0.0, cost.at(most_rows)), 0.0)
    return cost


def floors(costs: Sequence[Affine], most_rows: int) -> list[Affine]:
    """`floor_of` of each cost."""
    return [floor_of(cost, most_rows) for cost in costs]


def sums(costs: Sequence[Affine]) -> PrefixSums:
    """The sums before each cut."""
    return PrefixSums(
        prefix_sums([c.fixed for c in costs]), prefix_sums([c.per_sample for c in costs])
    )


def at_cuts(all_sums: PrefixSums, cuts: Sequence[int]) -> PrefixSums:
    """The sums at some of the cuts."""
    return PrefixSums(all_sums.fixed[cuts], all_sums.per_row[cuts])
