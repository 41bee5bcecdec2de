"""The arms of the search: placements with a rule of order, and what was found for each."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from statistics import median
from zlib import crc32

from penstock.core.native import Found, Point, PointRules, QuickPlay
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem
from penstock.planners.search.points import DEEPEST, quick_play, rules_of
from penstock.schedule.registry import FAMILIES
from penstock.schedule.shape import PlacementStyle

ROUNDS: dict[PlacementStyle, tuple[int, ...]] = {
    "straight": (1,),
    "mirrored": (1,),
    "looped": (2, 3, 4),
    "folded": (2, 4),
}
"""Stages that a group holds, by placement."""

SEARCHED: tuple[PlacementStyle, ...] = ("straight", "looped", "folded")
"""Placements for which orders are searched."""

DEPTHS = {
    "1f1b": (0, 0),
    "gpipe": (DEEPEST, DEEPEST),
    "wavefront": (4, 4),
    "zb-h1": (0, 0),
    "zb-h2": (2, 2),
}
"""Depths that a schedule prescribes, as a range of indices of `kDepths`; others take any."""

EQUIVALENT = frozenset({"1f1b-as", "1f1b-sno", "1f1b-so"})
"""Families that are not tried where faster or leaner ones are allowed."""

POOL = 8
"""Points of an arm that walks and climbs start at."""

FEW = 3
"""Points of an arm after which the median error of its quick simulation counts."""

STALE = 0.03
"""The share by which an arm counts as slower for each pull that found nothing."""


@dataclass(frozen=True, slots=True)
class ArmPoint:
    """A point of a pool: its seconds, by the exact simulation or by the quick one."""

    seconds: float
    point: Point
    depths: tuple[int, ...]
    is_exact: bool = False


def quick_point(found: Found) -> ArmPoint:
    """Return what the quick simulation found."""
    return ArmPoint(found.seconds, found.point, tuple(found.depths))


@dataclass(eq=False)
class Arm:
    """A placement with a rule of order, and the schedules that may make its orders."""

    problem: PlanningProblem
    style: PlacementStyle
    rounds: int
    split: bool
    schedules: tuple[str, ...]
    pool: list[ArmPoint] = field(default_factory=list[ArmPoint])
    best: ArmPoint | None = None
    best_plan: Plan | None = None
    lead: str = ""
    pulls: int = 0
    stale: int = 0
    gain: float = 0.0
    charged: int = 0
    ratios: list[float] = field(default_factory=list[float])
    climbed: set[Plan | None] = field(default_factory=set["Plan | None"])
    polished: set[Plan | None] = field(default_factory=set["Plan | None"])

    @property
    def title(self) -> str:
        """The arm in words."""
        if self.is_straight:
            return f"{self.schedules[0]}, one stage a device"
        stages = f", {self.rounds} stages a device" if self.rounds > 1 else ""
        return f"{self.schedules[0]}, {self.style}{stages}"

    @property
    def is_straight(self) -> bool:
        """True if every group has one stage, in the order of the pipeline."""
        return self.style == "straight"

    @property
    def is_searched(self) -> bool:
        """True if orders are searched for, which takes long."""
        return FAMILIES[self.schedules[0]].is_searched

    @cached_property
    def rules(self) -> PointRules:
        """Rules for the points of the arm."""
        placed = self.style, self.rounds
        return rules_of(self.problem, self.schedules, *placed, self.split, self.depths)

    @property
    def depths(self) -> tuple[int, int]:
        """The least and the greatest index of a depth."""
        ranges = [DEPTHS.get(name, (0, DEEPEST)) for name in self.schedules]
        return min(low for low, _ in ranges), max(high for _, high in ranges)

    @cached_property
    def play(self) -> QuickPlay:
        """The quick simulation of the arm's points."""
        return quick_play(self.problem, self.rules)

    @property
    def depth(self) -> int:
        """The index of the depth of first points."""
        low, high = self.depths
        return min(max(2, low), high)

    @property
    def best_s(self) -> float:
        """Exact seconds of the best plan."""
        return self.best.seconds if self.best else inf

    @property
    def promise_s(self) -> float:
        """Seconds expected of the next pull: it gains as the last, less the more found nothing."""
        return self.first_s * (1 + STALE * self.stale) * (1 - self.gain)

    @property
    def first_s(self) -> float:
        """The least seconds of any point, as far as they are known."""
        return min(self.best_s, min(map(self.estimate_s, self.pool), default=inf))

    def is_twin_of(self, other: "Arm") -> bool:
        """Return whether the quick simulation gives both arms the same seconds."""
        mine = self.style, self.rounds, self.split, self.depths
        return mine == (other.style, other.rounds, other.split, other.depths)

    def estimate_s(self, one: ArmPoint) -> float:
        """Return exact seconds, or what they are if the quick simulation errs as it mostly did."""
        if one.is_exact or len(self.ratios) < FEW:
            return one.seconds
        return one.seconds * median(self.ratios)

    def even_point(self, order: list[int], starts: list[int], size: int) -> Point:
        """Return a point that saves no memory, whose stages take about equally long."""
        groups = len(starts) - 1
        recompute, sharding = (
            [self.rules.recomputes[0]] * groups,
            [self.rules.shardings[0]] * groups,
        )
        point = Point(order, starts, [], recompute, sharding, size=size, depth=self.depth)
        self.play.even_cuts(point)
        return point

    def quick(self, point: Point) -> ArmPoint:
        """Return a point with the seconds and depths of the quick simulation."""
        return ArmPoint(self.play.seconds(point, inf), point, tuple(self.play.depths))

    def seed(self, number: int) -> int:
        """Return the seed of a pull of the arm or a twin, whatever other arms there are."""
        kind = self.schedules[0] if self.is_searched else ""
        return crc32(repr((self.style, self.rounds, self.split, kind, number)).encode()) // 2

    def add(self, found: Found) -> None:
        """Add a point to the pool, which keeps the best that differ in groups or size."""
        if found.seconds < inf:
            self.put(quick_point(found))

    def put(self, one: ArmPoint) -> None:
        """Add a point with its seconds."""
        best: dict[object, ArmPoint] = {}
        for other in (*self.pool, one):
            key = other.point.size, tuple(other.point.starts)
            if key not in best or self.estimate_s(other) < self.estimate_s(best[key]):
                best[key] = other
        self.pool = sorted(best.values(), key=self.estimate_s)[:POOL]


def arms_of(problem: PlanningProblem, schedules: Sequence[str]) -> list[Arm]:
    """Return an arm for each placement, fused or split backward and generator of orders.

    The early-backward family is one generator: where it is allowed, other depths are its own. So is
    each folded schedule: how long its orders take, beside other ones, depends much on the point.
    """
    worth = [name for name in schedules if name not in EQUIVALENT] or list(schedules)
    found: dict[tuple[PlacementStyle, int, bool, object], list[str]] = {}
    layers = len(problem.profile.layers)
    for name in worth:
        family = FAMILIES[name]
        for style in SEARCHED if family.is_searched else (family.placement,):
            for rounds in ROUNDS[style]:
                if family.rounds not in (0, rounds) or rounds > layers:
                    continue
                shares = family.flushes and not (family.is_searched or style == "folded")
                own = family.is_planned if shares else name
                found.setdefault((style, rounds, family.splits, own), []).append(name)
    arms: list[Arm] = []
    for (style, rounds, split, _), names in found.items():
        if "early-backward" in names:
            names = ["early-backward", *(name for name in names if name == "fbp-as")]
        arm = Arm(problem, style, rounds, split, tuple(names))
        may_be = arm.rules.recomputes and arm.rules.shardings
        if may_be and 0 < arm.rules.least_groups <= arm.rules.most_groups:
            arms.append(arm)
    return arms
