"""The exported names, for type checkers; `__init__.py` imports each when it is first used."""

from penstock.advice.choose_cluster import choose_cluster as choose_cluster
from penstock.advice.choose_cluster import plan_on_clusters as plan_on_clusters
from penstock.advice.plan_pipeline import compare_planners as compare_planners
from penstock.advice.plan_pipeline import plan_pipeline as plan_pipeline
from penstock.capture.batch.found_lengths import find_dynamic as find_dynamic
from penstock.capture.batch.lengths import Length as Length
from penstock.capture.batch.part import BatchPart as BatchPart
from penstock.capture.capture import capture_model as capture_model
from penstock.capture.chain import Chain as Chain
from penstock.cluster.cluster import Cluster as Cluster
from penstock.cluster.cluster import Device as Device
from penstock.cluster.cluster import Host as Host
from penstock.cluster.cluster import Link as Link
from penstock.cluster.toml_file import find_cluster as find_cluster
from penstock.cluster.toml_file import read_cluster as read_cluster
from penstock.cluster.toml_file import write_cluster as write_cluster
from penstock.errors import BadInput as BadInput
from penstock.errors import CaptureFailed as CaptureFailed
from penstock.errors import Infeasible as Infeasible
from penstock.errors import LossNotFinite as LossNotFinite
from penstock.errors import PenstockError as PenstockError
from penstock.errors import ReplicasDiffer as ReplicasDiffer
from penstock.errors import RunFailed as RunFailed
from penstock.errors import Stalled as Stalled
from penstock.errors import WeightElsewhere as WeightElsewhere
from penstock.measure.layer_times import measure_profile as measure_profile
from penstock.measure.roofline import estimate_profile as estimate_profile
from penstock.plan.json_file import read_plan as read_plan
from penstock.plan.json_file import write_plan as write_plan
from penstock.plan.plan import Plan as Plan
from penstock.plan.plan import Stage as Stage
from penstock.plan.problem import PlanningProblem as PlanningProblem
from penstock.profile.find import find_profile as find_profile
from penstock.profile.json_file import read_profile as read_profile
from penstock.profile.json_file import write_profile as write_profile
from penstock.profile.model_profile import Affine as Affine
from penstock.profile.model_profile import Edge as Edge
from penstock.profile.model_profile import LayerCost as LayerCost
from penstock.profile.model_profile import ModelProfile as ModelProfile
from penstock.report.page import write_report as write_report
from penstock.report.timeline_files import write_timeline as write_timeline
from penstock.runtime.batch_needs import BatchNeeds as BatchNeeds
from penstock.runtime.callbacks import Closing as Closing
from penstock.runtime.callbacks import Saved as Saved
from penstock.runtime.callbacks import keep_best as keep_best
from penstock.runtime.callbacks import save_at_sigterm as save_at_sigterm
from penstock.runtime.callbacks import stop_early as stop_early
from penstock.runtime.checkpoints.checkpoint import read_state as read_state
from penstock.runtime.checkpoints.loader_state import ResumableLoader as ResumableLoader
from penstock.runtime.metrics import StepMetrics as StepMetrics
from penstock.runtime.options import Safety as Safety
from penstock.runtime.options import Update as Update
from penstock.runtime.pipeline import Pipeline as Pipeline
from penstock.runtime.plan_for_ranks import plan_for_ranks as plan_for_ranks
from penstock.runtime.processes.launch import launch_workers as launch_workers
from penstock.runtime.tables import Constraints as Constraints
from penstock.runtime.tables import LossScaling as LossScaling
from penstock.runtime.tables import Weights as Weights
from penstock.runtime.trackers import track as track
from penstock.runtime.update.average import ExponentialAverage as ExponentialAverage
from penstock.runtime.user_metrics import Evaluation as Evaluation
from penstock.simulate.simulation import simulate_plan as simulate_plan

__version__: str
__all__: list[str]
MODULE_OF: dict[str, str]
