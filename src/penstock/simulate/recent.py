"""A memory of bounded size for answers that are asked for again and again."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["Recent"]

Key = TypeVar("Key", bound=Hashable)
Answer = TypeVar("Answer")


class Recent(Generic[Key, Answer]):
    """Keeps the answers used last, up to twice ``capacity`` in weight.

    Two generations: a new answer goes to the young one; when that is full it becomes the old one,
    and what was old and not asked for since is forgotten. So a hit costs one look-up in a dict,
    unlike an exact order of last use.
    """

    def __init__(self, capacity: int, weight: Callable[[Answer], int]) -> None:
        self.capacity = capacity
        self.weight = weight
        self.young: dict[Key, Answer] = {}
        self.old: dict[Key, Answer] = {}
        self.young_weight = 0

    def find(self, key: Key, make: Callable[[], Answer]) -> Answer:
        """The answer for ``key``; ``make`` gives it where it is not known."""
        found = self.young.get(key)
        if found is None:
            found = self.old.get(key)
            if found is None:
                found = make()
            self.keep(key, found)
        return found

    def keep(self, key: Key, answer: Answer) -> None:
        """Remember an answer; forget the old generation where the young one is full."""
        weight = self.weight(answer)
        if self.young_weight + weight > self.capacity:
            self.old, self.young, self.young_weight = self.young, {}, 0
        self.young[key] = answer
        self.young_weight += weight
