"""Builds the flat array of the compiled engine from the parts of a plan and its orders."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.kernels import compiled
from penstock.simulate.assembly import number_through
from penstock.simulate.assembly_tables import Joined
from penstock.simulate.gradients import TiedGroup
from penstock.simulate.orders import FlatOrders
from penstock.simulate.workload import Parts

__all__ = ["state_of"]

Whole: TypeAlias = npt.NDArray[np.int64]
Real: TypeAlias = npt.NDArray[np.float64]

NO_WHOLE = np.zeros(0, dtype=np.int64)
NO_REAL = np.zeros(0)


def state_of(parts: Parts, orders: FlatOrders, *, record: bool = False) -> Whole:
    """The array of `penstock.simulate.layout` before the play starts.

    ``record`` makes space for the spans of all events.
    """
    return compiled(number_through)(joined(parts, orders, record=record))


def joined(parts: Parts, orders: FlatOrders, *, record: bool) -> Joined:
    """The parts as joined arrays."""
    stages, boundaries, ties = parts.stages, parts.boundaries, parts.ties
    return Joined(
        micro_batches=orders.micro_batches,
        streams_each=orders.streams_each,
        records_spans=int(record),
        instances=len(stages),
        device_groups=(len(orders.start) - 1) // orders.streams_each,
        hosts=len(parts.host_slots),
        has_links=any(parts.separate_links),
        boundaries=len(boundaries),
        ties=len(ties),
        host_slots=np.array(parts.host_slots, dtype=np.int64),
        half_duplex=np.array(parts.half_duplex, dtype=np.int64),
        separate_links=np.array(parts.separate_links, dtype=np.int64),
        order_start=orders.start,
        order_words=orders.words,
        groups=np.array(orders.instances.groups, dtype=np.int64),
        rounds=np.array(orders.instances.rounds, dtype=np.int64) * orders.iterations,
        stage=np.concatenate([stage.whole for stage in stages]),
        stage_seconds=np.concatenate([stage.real for stage in stages]),
        ends=np.array([end for p, c, _ in boundaries for end in (p, c)], dtype=np.int64),
        boundary=np.concatenate([made.whole for *_, made in boundaries] or [NO_WHOLE]),
        boundary_seconds=np.concatenate([made.real for *_, made in boundaries] or [NO_REAL]),
        tie=np.concatenate([whole_of_tie(tie) for tie in ties] or [NO_WHOLE]),
        tie_seconds=np.concatenate([real_of_tie(tie) for tie in ties] or [NO_REAL]),
    )


def whole_of_tie(tie: TiedGroup) -> Whole:
    """The integers of a tie, as `Joined` describes them."""
    outgoing, incoming = tie.ports.outgoing, tie.ports.incoming
    buckets = sum(share.buckets for share in tie.shares)
    counts = (len(tie.stages), buckets, len(outgoing), len(incoming))
    return np.array([*counts, *tie.stages, *outgoing, *incoming], dtype=np.int64)


def real_of_tie(tie: TiedGroup) -> Real:
    """The seconds of a tie, as `Joined` describes them."""
    return np.array([share.seconds for share in tie.shares for _ in range(share.buckets)])
