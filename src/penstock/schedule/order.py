"""The actions of one device group in order, stored as three flat arrays."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias, overload

import numpy as np
import numpy.typing as npt

from penstock.schedule.action import ACTION_KINDS, KIND_CODES, Action

Codes: TypeAlias = npt.NDArray[np.int8]
Numbers: TypeAlias = npt.NDArray[np.int32]


class Order(Sequence[Action]):
    """An immutable sequence of actions that takes nine bytes an action.

    ``kinds[i]`` is the index of the kind of action ``i`` in `ACTION_KINDS`; ``stages[i]`` and
    ``micro_batches[i]`` are its numbers. `Action` objects are created on access.

    >>> order = Order([Action("F", 0, 0), Action("B", 0, 0)])
    >>> order[1], order.kinds.tolist()
    (Action(kind='B', stage=0, micro_batch=0), [0, 1])
    """

    __slots__ = ("kinds", "micro_batches", "stages")

    kinds: Codes
    stages: Numbers
    micro_batches: Numbers

    def __init__(self, actions: Iterable[Action] = ()) -> None:
        rows = [(KIND_CODES[a.kind], a.stage, a.micro_batch) for a in actions]
        table = np.array(rows, dtype=np.int64).reshape(-1, 3)
        fill(self, table[:, 0], table[:, 1], table[:, 2])

    def __len__(self) -> int:
        return len(self.kinds)

    @overload
    def __getitem__(self, index: int) -> Action: ...
    @overload
    def __getitem__(self, index: slice) -> "Order": ...
    def __getitem__(self, index: int | slice) -> "Action | Order":
        if isinstance(index, slice):
            return order_from_arrays(
                self.kinds[index], self.stages[index], self.micro_batches[index]
            )
        kind = ACTION_KINDS[int(self.kinds[index])]
        return Action(kind, int(self.stages[index]), int(self.micro_batches[index]))

    def __iter__(self) -> Iterator[Action]:
        kinds: list[int] = self.kinds.tolist()
        stages: list[int] = self.stages.tolist()
        micro_batches: list[int] = self.micro_batches.tolist()
        for kind, stage, micro_batch in zip(kinds, stages, micro_batches, strict=True):
            yield Action(ACTION_KINDS[kind], stage, micro_batch)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Order):
            return NotImplemented
        pairs = (
            (self.kinds, other.kinds),
            (self.stages, other.stages),
            (self.micro_batches, other.micro_batches),
        )
        return all(np.array_equal(mine, theirs) for mine, theirs in pairs)

    def __hash__(self) -> int:
        return hash((self.kinds.tobytes(), self.stages.tobytes(), self.micro_batches.tobytes()))

    def __repr__(self) -> str:
        return f"Order([{', '.join(map(repr, self))}])"


def order_from_arrays(
    kinds: npt.ArrayLike, stages: npt.ArrayLike, micro_batches: npt.ArrayLike
) -> Order:
    """The order whose action ``i`` is ``ACTION_KINDS[kinds[i]]`` of these numbers.

    Arguments are broadcast against each other, so one number can be given for all actions.

    >>> [str(action) for action in order_from_arrays([0, 0, 1], 2, [0, 1, 0])]
    ['2F0', '2F1', '2B0']
    """
    order = Order.__new__(Order)
    fill(order, *np.broadcast_arrays(kinds, stages, micro_batches))
    return order


def fill(
    order: Order, kinds: npt.ArrayLike, stages: npt.ArrayLike, micro_batches: npt.ArrayLike
) -> None:
    """Set the arrays of an order to read-only copies."""
    order.kinds = np.array(kinds, dtype=np.int8)
    order.stages = np.array(stages, dtype=np.int32)
    order.micro_batches = np.array(micro_batches, dtype=np.int32)
    for values in (order.kinds, order.stages, order.micro_batches):
        values.flags.writeable = False
