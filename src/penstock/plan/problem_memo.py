"""Keeps results for a problem that are needed often and take long to compute."""

from collections.abc import Callable
from typing import TypeVar
from weakref import ref

from penstock.plan.problem import PlanningProblem

__all__ = ["recalled", "remembered"]

MOST_ANSWERS = 100_000
"""So many answers of each kind are kept."""

Key = TypeVar("Key")
Answer = TypeVar("Answer")


def remembered(find: Callable[[PlanningProblem], Answer]) -> Callable[[PlanningProblem], Answer]:
    """``find``, with its result kept for as long as the problem exists.

    Problems are compared by identity, because hashing a problem with its profile is slow.
    """
    known: dict[int, tuple[ref[PlanningProblem], Answer]] = {}

    def answer(problem: PlanningProblem) -> Answer:
        key = id(problem)
        kept = known.get(key)
        if kept and kept[0]() is problem:
            return kept[1]
        found = find(problem)
        known[key] = (ref(problem, lambda _: known.pop(key, None)), found)
        return found

    return answer


def recalled(known: dict[Key, Answer], key: Key, find: Callable[[], Answer]) -> Answer:
    """The answer kept under ``key``, or the one found now, which is kept.

    All others are forgotten where there are too many.
    """
    answer = known.get(key)
    if answer is None:
        answer = find()
        if len(known) >= MOST_ANSWERS:
            known.clear()
        known[key] = answer
    return answer
