"""How much a plan's time depends on a split of the backward that nobody measured.

Published profiles have one time for the backward of a layer. Schedules with split backwards do the
part for the inputs and the part for the weights apart, so readers of such profiles assume that both
take equally long.
"""

from dataclasses import dataclass, replace

from penstock.bounds.lower_bound import lower_bound
from penstock.document import Json
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import LayerCost, ModelProfile
from penstock.schedule.registry import FAMILIES
from penstock.simulate.score import predict_plan
from penstock.words import seconds_text

__all__ = ["AssumedSplit", "assumed_split", "whole_backwards_words"]

ASSUMED = 0.5
"""The share of a backward that readers of profiles give to its inputs."""

OTHERS = {1 / 3: "a third", 2 / 3: "two thirds"}
"""Other shares with which the same plan is simulated."""


@dataclass(frozen=True)
class AssumedSplit:
    """Seconds of an iteration as assumed, and with other shares of the backward for its inputs."""

    iteration_s: float
    others: tuple[tuple[float, float], ...]

    def to_json(self) -> dict[str, Json]:
        """The shares and what the plan takes with each."""
        others: list[Json] = [
            {"input_share": share, "iteration_s": seconds} for share, seconds in self.others
        ]
        return {"input_share": ASSUMED, "others": others}

    def __str__(self) -> str:
        times = " and ".join(
            f"{seconds_text(seconds)} ({100 * (seconds / self.iteration_s - 1):+.1f} %) with "
            f"{OTHERS[share]}"
            for share, seconds in self.others
        )
        return (
            f"the profile has no times for the halves of a backward: half of it is assumed to be "
            f"for the inputs; the same plan takes {times}"
        )


def assumed_split(problem: PlanningProblem, plan: Plan, iteration_s: float) -> AssumedSplit | None:
    """Seconds of the plan with other splits; None where the split is known or plays no part.

    The order of work stays the one that was made for the assumed split.
    """
    if not problem.profile.halves_assumed or not FAMILIES[plan.schedule].splits:
        return None
    seconds = tuple(
        (share, played_s(problem, plan, with_input_share(problem.profile, share)))
        for share in OTHERS
    )
    return AssumedSplit(iteration_s, seconds)


def whole_backwards_words(problem: PlanningProblem) -> str:
    """The least time of plans for which the split plays no part, as a sentence."""
    bound = lower_bound(problem.under(PlanningProblem.schedules))
    return f"No plan with {bound.covers} takes less than {seconds_text(bound.seconds)}."


def played_s(problem: PlanningProblem, plan: Plan, profile: ModelProfile) -> float:
    """Seconds of an iteration of the plan with these costs."""
    own = replace(problem, profile=profile)
    return predict_plan(own, plan, with_timeline=False).iteration_s


def with_input_share(profile: ModelProfile, share: float) -> ModelProfile:
    """The profile with this share of every backward for its inputs."""

    def split(layer: LayerCost) -> LayerCost:
        whole = layer.backward_s
        return replace(
            layer,
            backward_input_s=whole.scaled(share),
            backward_weight_s=whole.scaled(1 - share),
        )

    return replace(profile, layers=tuple(map(split, profile.layers)))
