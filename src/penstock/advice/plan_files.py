"""A plan on disk, with its prediction and the names of its profile and cluster.

    plan.json             the plan, to be read and edited by hand
    plan.predicted.json   the output of ``penstock plan --json`` and what the plan was made for

The prediction stands beside the plan, because a plan may be written by hand.
"""

import os
from collections.abc import Mapping
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
        "profile": absolute(inputs.profile, MODELS),
        "profile_batch": inputs.profile_batch or 0,
        "cluster": absolute(inputs.cluster, CLUSTERS),
        **planned.to_json(planning_s),
    }
    write_text(prediction_path(path), json_text(document))


def absolute(name: str, known: Mapping[str, object]) -> str:
    """A known name, or a path from the root, so that it holds in every folder."""
    return name if name in known else str(Path(name).resolve())


def inputs_of_plan(plan_path: str | Path, given: PlanInputs) -> PlanInputs:
    """The inputs to simulate a plan with: as given, else as recorded, else the files of its run."""
    recorded = recorded_origin(plan_path)
    return PlanInputs(
        given.profile or recorded_name(plan_path, "profile", recorded),
        given.cluster or recorded_name(plan_path, "cluster", recorded),
        given.profile_batch or recorded.profile_batch,
        recorded.memory_reserve,
        recorded.optimizer_bytes_per_parameter_byte,
    )


def cluster_of_plan(plan_path: str, given: str) -> Cluster:
    """The cluster that is given, else that of the plan."""
    if not (given or plan_path):
        raise BadInput("which hosts? name a cluster with --cluster, or a plan that records one")
    return find_cluster(given or recorded_name(plan_path, "cluster", recorded_origin(plan_path)))


def profile_of_plan(plan_path: str | Path, given: PlanInputs) -> ModelProfile:
    """The profile that is given, else that of the plan."""
    recorded = recorded_origin(plan_path)
    name = given.profile or recorded_name(plan_path, "profile", recorded)
    return PlanInputs(name, "", given.profile_batch or recorded.profile_batch).read_profile()


BESIDE = {"profile": "profile.json", "cluster": "cluster.toml"}
"""The files of a run, beside its plan."""


def recorded_name(
    plan_path: str | Path, thing: Literal["profile", "cluster"], recorded: Origin
) -> str:
    """The profile or cluster of a plan: as recorded, else the file of its run."""
    beside = Path(plan_path).with_name(BESIDE[thing])
    if found := getattr(recorded, thing):
        return found
    if not os.path.isfile(beside):
        raise BadInput(
            f"plan '{plan_path}' does not say which {thing} it was made for, and there is none "
            f"beside it; name one with --{thing}"
        )
    return str(beside)


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
