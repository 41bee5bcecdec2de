"""Seconds of a step where pipelines side by side train alone and meet every N steps."""

from collections import defaultdict
from dataclasses import asdict, dataclass, replace

from penstock.files import Json
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem
from penstock.plan.side_by_side import pipelines_in
from penstock.simulate.catalogue import Catalogue
from penstock.simulate.instances import StageUse
from penstock.simulate.score import predict_plan
from penstock.text import counted, seconds_text


@dataclass(frozen=True, slots=True)
class MeetingPrice:
    """Seconds of a step of the slowest pipeline alone, and of a meeting every ``every`` steps."""

    every: int
    alone_s: float
    meeting_s: float

    @property
    def step_s(self) -> float:
        """Seconds of a step, with its share of a meeting."""
        return self.alone_s + self.meeting_s / self.every

    def words(self, summed_s: float) -> str:
        """The price in words, against ``summed_s`` with gradients summed in every step.

        >>> MeetingPrice(10, 0.2, 1.0).words(0.9)
        'Met every 10 steps: 300 ms a step (200 ms alone, 1.00 s a meeting), 3.0 times as fast'
        """
        return (
            f"Met every {counted(self.every, 'step')}: {seconds_text(self.step_s)} a step "
            f"({seconds_text(self.alone_s)} alone, {seconds_text(self.meeting_s)} a meeting), "
            f"{summed_s / self.step_s:.1f} times as fast"
        )

    def to_json(self) -> dict[str, Json]:
        return {**asdict(self), "step_s": self.step_s}


def meeting_price(problem: PlanningProblem, plan: Plan, every: int) -> MeetingPrice:
    """Seconds of a step of a plan if its pipelines meet every ``every`` steps.

    In a meeting all weights are summed, as gradients are in a step, and nothing else runs. Sums of
    stages run side by side, except that those that cross the same port follow one another.
    """
    pipelines_in(plan)
    alone_s = 0.0
    for number in range(plan.stages[0].replicas):
        (size,) = {stage.slices[number] for stage in plan.stages}
        stages = tuple(
            replace(stage, devices=(stage.devices[number],), slices=(size,))
            for stage in plan.stages
        )
        one = replace(plan, stages=stages, micro_batch_size=size, memory_bytes=())
        alone_s = max(alone_s, predict_plan(problem, one, with_timeline=False).iteration_s)
    catalogue = Catalogue(problem.profile, problem.cluster)
    busy_s = defaultdict[object, float](float)
    for stage in plan.stages:
        work = catalogue.stage(replace(stage, sharding=""), StageUse())
        for place in (stage, *{*work.ports.outgoing, *work.ports.incoming}):
            busy_s[place] += sum(share.buckets * share.seconds for share in work.shares)
    return MeetingPrice(every, alone_s, max(busy_s.values()))
