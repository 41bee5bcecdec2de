"""A cache of bounded size."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["Recent"]

Key = TypeVar("Key", bound=Hashable)
Answer = TypeVar("Answer")


class Recent(Generic[Key, Answer]):
    """Keeps the answers used last, up to twice ``capacity`` in total weight.

    There are two generations. A new answer goes to the young one. When that is full, it becomes the
    old one, and the previous old one is dropped. So a hit costs one dictionary look-up, unlike an
    exact LRU cache.
    """

    def __init__(self, capacity: int, weight: Callable[[Answer], int]) -> None:
        self.capacity = capacity
        self.weight = weight
        self.young: dict[Key, Answer] = {}
        self.old: dict[Key, Answer] = {}
        self.young_weight = 0

    def find(self, key: Key, make: Callable[[], Answer]) -> Answer:
        """The answer for ``key``; ``make`` creates it if it is not cached."""
        found = self.young.get(key)
        if found is None:
            found = self.old.get(key)
            if found is None:
                found = make()
            self.keep(key, found)
        return found

    def keep(self, key: Key, answer: Answer) -> None:
        """Cache an answer; when the young generation is full, drop the old one."""
        weight = self.weight(answer)
        if self.young_weight + weight > self.capacity:
            self.old, self.young, self.young_weight = self.young, {}, 0
        self.young[key] = answer
        self.young_weight += weight
