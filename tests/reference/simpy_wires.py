"""What several things of the SimPy model want at once, and who gets it first."""

from collections import Counter
from collections.abc import Generator, Iterable
from dataclasses import dataclass

import simpy

MESSAGE, REDUCTION, COMPUTE = range(3)

Process = Generator[simpy.Event, object, None]


@dataclass(frozen=True)
class Standstill:
    """That something computes nothing: several transfers may need it at once."""

    of: object


@dataclass(frozen=True)
class Turn:
    """That a device has passed so many messages."""

    device: int
    number: int


class Wires:
    """Engines, ports, busy devices: who needs several takes all or waits; urgent and old first."""

    def __init__(self, env: simpy.Environment) -> None:
        self.env = env
        self.taken: set[object] = set()
        self.standing: Counter[object] = Counter()
        self.turns: Counter[int] = Counter()
        self.waiting: list[tuple[int, int, frozenset[object], set[object], simpy.Event]] = []
        self.asked = 0

    def carry(
        self, needs: Iterable[object], seconds: float, urgency: int, first: Iterable[object] = ()
    ) -> Process:
        """Hold ``needs`` for ``seconds`` once they are free; ``first`` computes nothing before."""
        wanted = frozenset(needs)
        yield self.take(wanted, urgency, first)
        yield self.env.timeout(seconds)
        self.give(wanted)

    def take(
        self, wanted: frozenset[object], urgency: int, first: Iterable[object] = ()
    ) -> simpy.Event:
        """Ask for all that is wanted; what happens when it is granted."""
        granted = self.env.event()
        self.asked += 1
        self.waiting.append((urgency, self.asked, wanted, set(first), granted))
        self.grant()
        return granted

    def give(self, wanted: frozenset[object]) -> None:
        """Free what was taken."""
        self.taken -= wanted
        self.turns.update(need.device for need in wanted if isinstance(need, Turn))
        self.standing.subtract(standstills(wanted))
        self.grant()

    def grant(self) -> None:
        """Start, in order, whatever finds all it needs."""
        held = set[object]()
        for request in sorted(self.waiting, key=lambda request: request[:2]):
            urgency, _, wanted, first, granted = request
            if self.are_free(wanted) and not (urgency == COMPUTE and held & wanted):
                self.waiting.remove(request)
                self.taken |= {need for need in wanted if not isinstance(need, Standstill)}
                self.standing.update(standstills(wanted))
                granted.succeed()
            else:
                held |= first

    def are_free(self, wanted: frozenset[object]) -> bool:
        """Whether all that is wanted is free, and what is to stand still does not compute."""
        needs = {need.of if isinstance(need, Standstill) else need for need in wanted}
        alone = [need for need in wanted if not isinstance(need, Standstill)]
        if any(self.turns[need.device] != need.number for need in wanted if isinstance(need, Turn)):
            return False
        return not needs & self.taken and not any(self.standing[need] for need in alone)


def standstills(wanted: frozenset[object]) -> list[object]:
    """What is to stand still."""
    return [need.of for need in wanted if isinstance(need, Standstill)]
