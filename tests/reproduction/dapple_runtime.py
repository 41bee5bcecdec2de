"""DAPPLE's comparison of its runtime with GPipe (PPoPP 2021): BERT-48 on two V100 of 16 GB.

Micro-batches of 2 samples; the published figures are samples a second and gigabytes, averaged over
the two devices. They are rounded, and do not say how a stage's time splits into forward and
backward, which does not matter here: both schedules take ``(M + 1) (F + B)`` on two equal stages.

What goes in:

- times: two parameters a mode. A micro-batch takes each stage 0.222 s, 0.270 s with recompute, and
  an iteration 0.118 s and 0.130 s beside (a line through DAPPLE's rows). Transfers are in these.
- memory: 16 bytes for each of 640 million parameters (the paper's weak scaling), 3.473e9 bytes of
  activations a sample (the authors' released planner), and one constant: `OTHER_BYTES`, from the
  row of GPipe with M = 2. With recompute two more, from GPipe's rows with M = 2 and M = 5: bytes
  kept of a micro-batch, and bytes needed while one is computed again. Gigabytes are read as 2**30.
- an assumption of ours: of GPipe's backwards, which follow one another, two are in memory at once,
  one that runs and one whose recompute is done, for TensorFlow computes whatever has its inputs. In
  1F1B a forward stands between them, and control edges keep the order. With one for both, early
  backward would come out 10 % too high.
- the limit: TensorFlow keeps back 5 % of a device's memory, here of the 16,160 MiB of a V100.

All else is predicted.
"""

from reproduction.published import RUNS

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.plan.plan import Plan, Stage
from penstock.profile.model_profile import Affine, LayerCost, ModelProfile
from penstock.simulate.simulation import Prediction, simulate_plan

GIB = 2.0**30
MICRO_BATCH = 2
PARAMETERS = 640e6
BYTES_OF_A_PARAMETER = 4
SAVED_BYTES_OF_A_SAMPLE = 3.473e9
LIMIT_BYTES = 0.95 * 16_160 * 2.0**20
LARGEST_TRIED = 16

STATE_BYTES = 16 * PARAMETERS / 2
SAVED_BYTES = SAVED_BYTES_OF_A_SAMPLE / 2 * MICRO_BATCH
OTHER_BYTES = 12.1 * GIB - STATE_BYTES - 2 * SAVED_BYTES
KEPT_BYTES = (13.2 - 9.9) / (5 - 2) * GIB
COMPUTED_AGAIN_AT_ONCE = {"gpipe": 2, "1f1b": 1}
RECOMPUTED_BYTES = (9.9 * GIB - 2 * KEPT_BYTES - STATE_BYTES - OTHER_BYTES) / 2


MEMORY_INPUTS = (RUNS[0], RUNS[2], RUNS[3])
"""The rows from whose memory constants were taken."""

CLUSTER = Cluster("two V100", (Host("host", (Device("V100-16GB", LIMIT_BYTES),) * 2, 1e12),))


def profile(schedule: str, recompute: bool) -> ModelProfile:
    """BERT-48 as two equal layers.

    Recompute is in the costs here, not in the plan: DAPPLE computes again on both stages, where
    our runtime does not if the backward follows the forward at once.
    """
    stage_s, step_s = (0.270, 0.130) if recompute else (0.222, 0.118)
    parameter_bytes = int(BYTES_OF_A_PARAMETER * PARAMETERS / 2)
    again_bytes = COMPUTED_AGAIN_AT_ONCE[schedule] * RECOMPUTED_BYTES
    half = LayerCost(
        name="half",
        forward_s=Affine(stage_s / 3),
        backward_input_s=Affine(stage_s / 3),
        backward_weight_s=Affine(stage_s / 3),
        parameter_bytes=parameter_bytes,
        buffer_bytes=round(OTHER_BYTES),
        saved_bytes=Affine(KEPT_BYTES if recompute else SAVED_BYTES),
        workspace_bytes=Affine(again_bytes if recompute else 0.0),
    )
    return ModelProfile("bert-48 in halves", (half, half), step_s_per_byte=step_s / parameter_bytes)


def row_inputs(
    schedule: str, recompute: bool, micro_batches: int
) -> tuple[Plan, ModelProfile, Cluster]:
    """What a row is about."""
    stages = tuple(Stage(range(i, i + 1), (i,), (MICRO_BATCH,)) for i in range(2))
    plan = Plan(stages, micro_batches, MICRO_BATCH, schedule)
    return plan, profile(schedule, recompute), CLUSTER


def play(schedule: str, recompute: bool, micro_batches: int) -> Prediction:
    """What the simulator makes of a row."""
    return simulate_plan(*row_inputs(schedule, recompute, micro_batches))


def samples_per_s(prediction: Prediction, micro_batches: int) -> float:
    return micro_batches * MICRO_BATCH / prediction.iteration_s


def mean_peak_gib(prediction: Prediction) -> float:
    return sum(prediction.peak_memory_bytes) / len(prediction.peak_memory_bytes) / GIB


def largest_that_fits(schedule: str, recompute: bool) -> int:
    """The most micro-batches, up to `LARGEST_TRIED`, that fit in memory."""
    counts = range(1, LARGEST_TRIED + 1)
    return max(m for m in counts if play(schedule, recompute, m).fits)
