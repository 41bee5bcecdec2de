"""Builds the flat arrays of the compiled engine from the parts of a plan and its orders."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.kernels import compiled
from penstock.simulate.assembly import number_through
from penstock.simulate.gradients import TiedGroup
from penstock.simulate.orders import FlatOrders
from penstock.simulate.workload import Parts

__all__ = ["Arrays", "arrays_of"]

Whole: TypeAlias = npt.NDArray[np.int64]
Real: TypeAlias = npt.NDArray[np.float64]

NO_WHOLE = np.zeros(0, dtype=np.int64)
NO_REAL = np.zeros(0)


@dataclass(frozen=True, slots=True)
class Arrays:
    """The integer and the float array of `penstock.simulate.layout`, before the play starts."""

    whole: Whole
    real: Real


def arrays_of(parts: Parts, orders: FlatOrders, *, record: bool = False) -> Arrays:
    """The arrays of a workload; ``record`` makes space for the spans of all events."""
    stages, boundaries, ties = parts.stages, parts.boundaries, parts.ties
    ends = np.array([end for p, c, _ in boundaries for end in (p, c)], dtype=np.int64)
    made = compiled(number_through)(
        orders.micro_batches,
        int(record),
        orders.streams_each,
        np.array(parts.host_slots, dtype=np.int64),
        np.array(parts.half_duplex, dtype=np.int64),
        np.array(parts.separate_links, dtype=np.int64),
        (orders.start, orders.words),
        np.array(orders.instances.groups, dtype=np.int64),
        np.array(orders.instances.rounds, dtype=np.int64) * orders.iterations,
        np.concatenate([stage.whole for stage in stages]),
        np.concatenate([stage.real for stage in stages]),
        ends,
        np.concatenate([made.whole for _, _, made in boundaries]) if boundaries else NO_WHOLE,
        np.concatenate([made.real for _, _, made in boundaries]) if boundaries else NO_REAL,
        np.concatenate([whole_of_tie(tie) for tie in ties]) if ties else NO_WHOLE,
        np.concatenate([real_of_tie(tie) for tie in ties]) if ties else NO_REAL,
    )
    return Arrays(*made)


def whole_of_tie(tie: TiedGroup) -> Whole:
    """The integers of a tie, as `penstock.simulate.assembly` reads them."""
    outgoing, incoming = tie.ports.outgoing, tie.ports.incoming
    buckets = sum(share.buckets for share in tie.shares)
    counts = (len(tie.stages), buckets, len(outgoing), len(incoming))
    return np.array([*counts, *tie.stages, *outgoing, *incoming], dtype=np.int64)


def real_of_tie(tie: TiedGroup) -> Real:
    """The seconds of a tie, as `penstock.simulate.assembly` reads them."""
    return np.array([share.seconds for share in tie.shares for _ in range(share.buckets)])
