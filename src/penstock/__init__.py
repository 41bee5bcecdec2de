"""Planned pipeline-parallel training for PyTorch.

Everything here is imported when it is first used, so that ``import penstock`` is fast and what
needs no torch does not load it. Packages have nouns for names (`penstock.plan`), functions verbs
(`plan_pipeline`), so that no name is both.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.ask_planner import compare_planners, plan_pipeline
    from penstock.capture.batch_part import BatchPart
    from penstock.capture.capture import capture_model
    from penstock.capture.chain import Chain
    from penstock.capture.found_lengths import find_dynamic
    from penstock.capture.lengths import Length
    from penstock.cluster.cluster import Cluster, Device, Host, Link
    from penstock.cluster.toml_file import find_cluster, read_cluster, write_cluster
    from penstock.errors import (
        BadInput,
        CaptureFailed,
        Infeasible,
        LossNotFinite,
        PenstockError,
        ReplicasDiffer,
        RunFailed,
        Stalled,
    )
    from penstock.measure.layer_times import measure_profile
    from penstock.measure.roofline import estimate_profile
    from penstock.plan.json_file import read_plan, write_plan
    from penstock.plan.plan import Plan, Stage
    from penstock.plan.problem import PlanningProblem
    from penstock.planning.hardware_choice import choose_cluster, plan_on_clusters
    from penstock.profile.find import find_profile
    from penstock.profile.json_file import read_profile, write_profile
    from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
    from penstock.report.page import write_report
    from penstock.report.timeline_files import write_timeline
    from penstock.runtime.batch_needs import BatchNeeds
    from penstock.runtime.callbacks import Closing, Saved, save_at_sigterm
    from penstock.runtime.checkpoints.checkpoint import read_state
    from penstock.runtime.checkpoints.loader_state import ResumableLoader
    from penstock.runtime.gradients.loss_scaling import LossScaling
    from penstock.runtime.metrics import StepMetrics
    from penstock.runtime.pipeline import Pipeline
    from penstock.runtime.plan_for_ranks import plan_for_ranks
    from penstock.runtime.processes.launch import launch_workers
    from penstock.runtime.settings import Safety, Update
    from penstock.runtime.trackers import track
    from penstock.runtime.user_metrics import Evaluation
    from penstock.runtime.weight_average import ExponentialAverage
    from penstock.runtime.weights.pretrained import Weights
    from penstock.simulate.simulation import simulate_plan

__version__ = "0.1.0"

__all__ = [
    "Affine",
    "BadInput",
    "BatchNeeds",
    "BatchPart",
    "CaptureFailed",
    "Chain",
    "Closing",
    "Cluster",
    "Device",
    "Edge",
    "Evaluation",
    "ExponentialAverage",
    "Host",
    "Infeasible",
    "LayerCost",
    "Length",
    "Link",
    "LossNotFinite",
    "LossScaling",
    "ModelProfile",
    "PenstockError",
    "Pipeline",
    "Plan",
    "PlanningProblem",
    "ReplicasDiffer",
    "ResumableLoader",
    "RunFailed",
    "Safety",
    "Saved",
    "Stage",
    "Stalled",
    "StepMetrics",
    "Update",
    "Weights",
    "capture_model",
    "choose_cluster",
    "compare_planners",
    "estimate_profile",
    "find_cluster",
    "find_dynamic",
    "find_profile",
    "launch_workers",
    "measure_profile",
    "plan_for_ranks",
    "plan_on_clusters",
    "plan_pipeline",
    "read_cluster",
    "read_plan",
    "read_profile",
    "read_state",
    "save_at_sigterm",
    "simulate_plan",
    "track",
    "write_cluster",
    "write_plan",
    "write_profile",
    "write_report",
    "write_timeline",
]

PLACES = {
    "penstock.ask_planner": ("compare_planners", "plan_pipeline"),
    "penstock.capture.batch_part": ("BatchPart",),
    "penstock.capture.chain": ("Chain",),
    "penstock.capture.found_lengths": ("find_dynamic",),
    "penstock.capture.lengths": ("Length",),
    "penstock.capture.capture": ("capture_model",),
    "penstock.cluster.cluster": ("Cluster", "Device", "Host", "Link"),
    "penstock.cluster.toml_file": ("find_cluster", "read_cluster", "write_cluster"),
    "penstock.errors": (
        "BadInput",
        "CaptureFailed",
        "Infeasible",
        "LossNotFinite",
        "PenstockError",
        "ReplicasDiffer",
        "RunFailed",
        "Stalled",
    ),
    "penstock.measure.layer_times": ("measure_profile",),
    "penstock.measure.roofline": ("estimate_profile",),
    "penstock.plan.json_file": ("read_plan", "write_plan"),
    "penstock.plan.plan": ("Plan", "Stage"),
    "penstock.plan.problem": ("PlanningProblem",),
    "penstock.planning.hardware_choice": ("choose_cluster", "plan_on_clusters"),
    "penstock.profile.find": ("find_profile",),
    "penstock.profile.json_file": ("read_profile", "write_profile"),
    "penstock.profile.model_profile": ("Affine", "Edge", "LayerCost", "ModelProfile"),
    "penstock.report.page": ("write_report",),
    "penstock.report.timeline_files": ("write_timeline",),
    "penstock.runtime.batch_needs": ("BatchNeeds",),
    "penstock.runtime.callbacks": ("Closing", "Saved", "save_at_sigterm"),
    "penstock.runtime.checkpoints.checkpoint": ("read_state",),
    "penstock.runtime.checkpoints.loader_state": ("ResumableLoader",),
    "penstock.runtime.trackers": ("track",),
    "penstock.runtime.user_metrics": ("Evaluation",),
    "penstock.runtime.gradients.loss_scaling": ("LossScaling",),
    "penstock.runtime.metrics": ("StepMetrics",),
    "penstock.runtime.pipeline": ("Pipeline",),
    "penstock.runtime.plan_for_ranks": ("plan_for_ranks",),
    "penstock.runtime.processes.launch": ("launch_workers",),
    "penstock.runtime.settings": ("Safety", "Update"),
    "penstock.runtime.weight_average": ("ExponentialAverage",),
    "penstock.runtime.weights.pretrained": ("Weights",),
    "penstock.simulate.simulation": ("simulate_plan",),
}
"""The module of each exported name; a test holds it equal to the imports above."""

RENAMED = {"InProcessPipeline": 'Pipeline(..., safety=Safety(transport="in-process"))'}
"""Names of 0.1 that go on to work, and warn."""

MODULE_OF = {name: module for module, names in PLACES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in MODULE_OF:
        if name in RENAMED:
            return renamed(name)
        raise AttributeError(f"module 'penstock' has no attribute '{name}'")
    try:
        value = getattr(import_module(MODULE_OF[name]), name)
    except ModuleNotFoundError as error:
        from penstock.errors import missing_for_training

        raise ModuleNotFoundError(missing_for_training(error) or error, name=error.name) from error
    globals()[name] = value
    return value


def renamed(name: str) -> object:
    """What a name of 0.1 stands for now."""
    from functools import partial
    from warnings import warn

    pipeline, safety = (vars(import_module(MODULE_OF[n]))[n] for n in ("Pipeline", "Safety"))
    warn(f"penstock.{name} is an old name: write {RENAMED[name]}", FutureWarning, stacklevel=3)
    return partial(pipeline, safety=safety(transport="in-process"))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
