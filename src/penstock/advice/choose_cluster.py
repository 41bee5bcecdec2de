"""Choice of hardware: the plan, the time and the price on each of several clusters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from penstock.advice.assessment import PlannedPipeline, assess_plan, baselines_of
from penstock.cluster.cluster import Cluster
from penstock.errors import BadInput, Infeasible
from penstock.files import Json
from penstock.plan.problem import foreign_kinds
from penstock.planners.find_plan import find_plan
from penstock.planners.problem import planning_problem
from penstock.profile.model_profile import ModelProfile
from penstock.simulate.score import make_score


@dataclass(frozen=True, repr=False)
class ClusterChoice:
    """Time and price of training ``samples`` samples on a cluster; infinite where no plan fits.

    ``times_of`` is the device whose times count, empty where the profile does not say it.
    """

    cluster: Cluster
    outcome: PlannedPipeline | Infeasible
    samples: float
    times_of: str = ""

    def __repr__(self) -> str:
        return f"ClusterChoice('{self.cluster.name}', {self.hours:.3g} h, price {self.price:.4g})"

    @property
    def hours(self) -> float:
        """Hours of the training."""
        if isinstance(self.outcome, Infeasible):
            return inf
        return self.outcome.throughput.hours(self.samples)

    @property
    def price(self) -> float:
        """The price of the whole cluster for these hours; 0 where it is not known."""
        return self.hours * self.cluster.price_per_hour if self.hours < inf else inf

    def to_json(self) -> dict[str, Json]:
        """The keys that the command line documents."""
        head: dict[str, Json] = {"cluster": self.cluster.name, "times_of": self.times_of}
        if isinstance(self.outcome, Infeasible):
            return head | {"infeasible": str(self.outcome)}
        plan = self.outcome.to_json(planning_s=0.0)
        del plan["planning_s"]
        return head | {"hours": self.hours, "price": self.price} | plan


def samples_with_tokens(profile: ModelProfile, tokens: float) -> float:
    """The number of samples that have ``tokens`` tokens."""
    if not profile.tokens_per_sample:
        raise BadInput(
            f"profile '{profile.name}' does not say how many tokens a sample has; add "
            f"tokens_per_sample to it, or give --samples"
        )
    return tokens / profile.tokens_per_sample


def plan_on_clusters(
    profile: ModelProfile | Sequence[ModelProfile],
    clusters: Sequence[Cluster],
    batch: int,
    samples: float,
    *,
    planner: str = "search",
    foreign_times: bool = False,
    on_cluster: Callable[[str], None] = lambda name: None,
) -> list[ClusterChoice]:
    """The plan for each cluster, cheapest training first; the choices that plans have by default.

    ``profile`` is one for all clusters, or one for each. With ``foreign_times`` the times of one
    device count for another kind, too. ``on_cluster`` is called with the name of each cluster
    before it is planned for. Where no cluster has prices, the fastest comes first.

    Raises:
        BadInput: only some clusters have prices, a device is not the profile's, or a speed does not
            go with it.
    """
    every = [profile] * len(clusters) if isinstance(profile, ModelProfile) else profile
    for own, cluster in zip(every, clusters, strict=True):
        if not cluster.price_per_hour and any(each.price_per_hour for each in clusters):
            raise BadInput(
                f"cluster '{cluster.name}' has no prices, and others have; add price_per_hour to "
                f"each of its [[hosts]], in the same currency"
            )
        if not foreign_times and (foreign := foreign_kinds(own, cluster)):
            raise BadInput(
                f"the times of profile '{own.name}' are of {own.device}, and cluster "
                f"'{cluster.name}' has {', '.join(foreign)}; name a job in place of the profile, "
                f"and each device is estimated, or accept them with --foreign-times"
            )
    choices: list[ClusterChoice] = []
    for own, cluster in zip(every, clusters, strict=True):
        on_cluster(cluster.name)
        problem = planning_problem(own, cluster, batch, planner=planner)
        score = make_score(problem)
        outcome: PlannedPipeline | Infeasible
        try:
            plan = find_plan(problem, planner, score)
            outcome = assess_plan(plan, problem, baselines_of(problem, score))
        except Infeasible as refusal:
            outcome = refusal
        choices.append(ClusterChoice(cluster, outcome, samples, own.device))
    return sorted(choices, key=lambda choice: (choice.price, choice.hours))


def choose_cluster(choices: Sequence[ClusterChoice], within_hours: float = inf) -> ClusterChoice:
    """The cheapest of ``choices`` that is done in ``within_hours``.

    Raises:
        Infeasible: no plan fits on any cluster, or none is done in time; says which is fastest.
    """
    fastest = min(choices, key=lambda choice: choice.hours)
    if isinstance(fastest.outcome, Infeasible):
        raise Infeasible(f"cluster '{fastest.cluster.name}': {fastest.outcome}")
    in_time = [choice for choice in choices if choice.hours <= within_hours]
    if not in_time:
        raise Infeasible(
            f"no cluster is done within {within_hours:g} h; the fastest, "
            f"'{fastest.cluster.name}', takes {fastest.hours:.3g} h; allow that, or name a larger "
            f"cluster"
        )
    return min(in_time, key=lambda choice: (choice.price, choice.hours))
