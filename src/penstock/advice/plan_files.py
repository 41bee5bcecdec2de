"""A plan on disk, with its prediction and the names of its profile and cluster.

    plan.json             the plan, to be read and edited by hand
    plan.predicted.json   the output of ``penstock plan --json`` and what the plan was made for

The prediction stands beside the plan, because a plan may be written by hand.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from penstock.advice.assessment import PlannedPipeline
from penstock.cluster.cluster import Cluster
from penstock.cluster.toml_file import CLUSTERS, find_cluster
from penstock.errors import BadInput
from penstock.files import Json, json_text, parse_json, read_text, write_text
from penstock.plan.json_file import write_plan
from penstock.profile.built_in import MODELS
from penstock.profile.find import find_profile
from penstock.profile.model_profile import ModelProfile


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """The profile and cluster of a plan, as given on the command line; empty where not given.

    ``memory_reserve`` is the share of memory that a plan was made to leave free, and
    ``optimizer_state`` what the optimizer keeps for each byte of parameters.
    """

    profile: str = ""
    cluster: str = ""
    profile_batch: int | None = None
    memory_reserve: float = 0.0
    optimizer_state: float = 2.0

    def read_profile(self) -> ModelProfile:
        """The profile."""
        return find_profile(self.profile, self.profile_batch or None)

    def read_cluster(self) -> Cluster:
        """The cluster."""
        return find_cluster(self.cluster)


class Origin(BaseModel):
    """The part of a prediction file that says what the plan was made for."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    format: Literal["penstock-prediction"]
    profile: str = ""
    cluster: str = ""
    profile_batch: int = 0
    iteration_s: float = 0.0
    memory_reserve: float = 0.0
    optimizer_bytes_per_parameter_byte: float = 2.0


def prediction_path(plan_path: str | Path) -> Path:
    """The path of the prediction of a plan.

    >>> prediction_path("runs/plan.json").as_posix()
    'runs/plan.predicted.json'
    """
    path = Path(plan_path)
    return path.with_name(f"{path.stem}.predicted.json")


def write_planned(
    planned: PlannedPipeline, path: str | Path, inputs: PlanInputs, planning_s: float
) -> None:
    """Write a plan, and beside it what was predicted."""
    write_plan(planned.plan, path)
    document: dict[str, Json] = {
        "format": "penstock-prediction",
        "schema_version": 1,
        "profile": inputs.profile if inputs.profile in MODELS else absolute(inputs.profile),
        "profile_batch": inputs.profile_batch or 0,
        "cluster": inputs.cluster if inputs.cluster in CLUSTERS else absolute(inputs.cluster),
        **planned.to_json(planning_s),
    }
    write_text(prediction_path(path), json_text(document))


def inputs_of_plan(plan_path: str | Path, given: PlanInputs) -> PlanInputs:
    """The inputs to simulate a plan with: as given, else as recorded, else the files of its run."""
    recorded = recorded_origin(plan_path)
    beside = Path(plan_path).parent
    profile = given.profile or recorded.profile or existing(beside / "profile.json")
    cluster = given.cluster or recorded.cluster or existing(beside / "cluster.toml")
    check_named(profile, "profile", plan_path)
    check_named(cluster, "cluster", plan_path)
    batch = given.profile_batch or recorded.profile_batch
    state = recorded.optimizer_bytes_per_parameter_byte
    return PlanInputs(profile, cluster, batch, recorded.memory_reserve, state)


def cluster_of_plan(plan_path: str, given: str) -> Cluster:
    """The cluster that is given, else the one recorded with the plan, else the one beside it."""
    found = given
    if not found and plan_path:
        beside = Path(plan_path).parent / "cluster.toml"
        found = recorded_origin(plan_path).cluster or existing(beside)
    if not found:
        raise BadInput("which hosts? name a cluster with --cluster, or a plan that records one")
    return find_cluster(found)


def profile_of_plan(plan_path: str | Path, given: PlanInputs) -> ModelProfile:
    """The profile of a plan: as given, else as recorded, else that of its run."""
    recorded = recorded_origin(plan_path)
    beside = existing(Path(plan_path).parent / "profile.json")
    name = given.profile or recorded.profile or beside
    check_named(name, "profile", plan_path)
    return PlanInputs(name, "", given.profile_batch or recorded.profile_batch).read_profile()


def check_named(found: str, thing: str, plan_path: str | Path) -> None:
    """Raise `BadInput` if a plan's profile or cluster was not ``found``."""
    if not found:
        raise BadInput(
            f"plan '{plan_path}' does not say which {thing} it was made for, and there is none "
            f"beside it; name one with --{thing}"
        )


def recorded_origin(plan_path: str | Path) -> Origin:
    """The origin recorded in the prediction next to a plan; empty where there is none."""
    path = prediction_path(plan_path)
    if not os.path.isfile(path):
        return Origin(format="penstock-prediction")
    try:
        return Origin.model_validate(parse_json(read_text(path, "prediction"), path, "prediction"))
    except ValueError as cause:
        raise BadInput(
            f"prediction '{path}' is none that 'penstock plan' wrote; delete it and name profile "
            f"and cluster with --profile and --cluster"
        ) from cause


def absolute(path: str) -> str:
    """The path from the root, so that it holds in every folder."""
    return str(Path(path).resolve())


def existing(path: Path) -> str:
    """The path as text where there is such a file, else nothing."""
    return str(path) if os.path.isfile(path) else ""
