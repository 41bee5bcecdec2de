"""The trainer of transformers in a pipeline: what transformers' own gives in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from docs.test_pages import DOCS, ROOT, torchrun_of
from integrations.loops.hugging_face_cases import model, plan_of, trained, without_a_plan
from plan_here_cases import ONE, TWO, find_other_plan
from started_scripts import by_workers

from penstock import Constraints
from penstock.errors import BadInput
from penstock.runtime.processes.launch import launch_workers

pytest.importorskip("accelerate")

CLOSE = 2e-5
"""Relative: float32, whose sums a pipeline makes in another order, over 14 steps of AdamW."""


def by(trainer: str, folder: Path, changes: dict[str, Any], *more: Any) -> list[Any]:
    workers = 2 if trainer == "pipeline" else 1
    return launch_workers(
        trained, (trainer, str(folder), changes, *more), workers=workers, threads=1
    )


def same(found: list[dict[str, float]], wanted: list[dict[str, float]], close: float) -> None:
    """The same rows of the log, besides times."""
    assert len(found) == len(wanted) > 0
    for row, other in zip(found, wanted, strict=True):
        left_out = ("runtime", "per_second", "preparation_time")
        keys = [key for key in other if not key.endswith(left_out)]
        assert set(keys) <= set(row)
        assert [row[key] for key in keys] == pytest.approx([other[key] for key in keys], rel=close)


def compared(tmp_path: Path, changes: dict[str, Any], *more: Any, close: float = CLOSE) -> Any:
    (log, told, weights), *_ = by("plain", tmp_path / "plain", changes, *more)
    (found, own_told, own_weights), (other, *_) = by("pipeline", tmp_path / "own", changes, *more)
    same(found, log, close)
    same(other, log, close)
    assert own_told == told
    assert weights.keys() == own_weights.keys()
    for name, weight in weights.items():
        assert torch.allclose(own_weights[name], weight, rtol=0, atol=20 * close), name
    return found


@pytest.mark.timeout(600)
def test_losses_evaluations_weights_and_checkpoints_are_those_of_one_process(
    tmp_path: Path,
) -> None:
    """With accumulation, clipping, warm-up, decay, lengths, and a last batch that is not full."""
    log = compared(tmp_path, {})
    assert log[0]["loss"] > log[15]["loss"] + 0.3
    checkpoint = tmp_path / "own" / "checkpoint-10"
    (resumed, *_), _ = by("pipeline", tmp_path / "resumed", {}, str(checkpoint))
    same(resumed[12:-2], log[12:-2], 0.0)
    names = {path.name for path in checkpoint.iterdir()}
    assert names >= {"config.json", "trainer_state.json", "pipeline", "rng_state.pth"}


@pytest.mark.timeout(600)
def test_a_resumed_run_keeps_the_plan_that_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "kept"))

    def train(name: str, constraints: Constraints, *resume: str) -> tuple[int, list[float]]:
        given = str(tmp_path / name), constraints, *resume
        return launch_workers(without_a_plan, given, workers=2, threads=1)[0]

    whole = train("whole", TWO)
    assert train("other", ONE)[0] == 1
    find_other_plan(TWO, ONE)
    assert train("resumed", TWO, str(tmp_path / "whole" / "checkpoint-2")) == whole


@pytest.mark.timeout(600)
def test_the_example_has_the_losses_of_the_script_that_it_was(tmp_path: Path) -> None:
    script = ROOT / "examples" / "loop_hugging_face_before.py"
    (alone,) = by_workers(script, tmp_path / "before", ranks=1)
    before = [line for line in alone.splitlines() if line.startswith("loss")]
    page = DOCS / "guides" / "hugging-face.md"
    printed = torchrun_of(page, "loop_hugging_face.py", tmp_path).splitlines()
    assert len(before) == 10
    assert [line for line in printed if line.startswith("loss")] == before


VARIANTS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "linear, adafactor": ({"optim": "adafactor", "lr_scheduler_type": "linear"}, ()),
    "label smoothing, sgd": (
        {
            "label_smoothing_factor": 0.1,
            "optim": "sgd",
            "learning_rate": 0.1,
            "gradient_accumulation_steps": 1,
        },
        (),
    ),
    "a loss of the user's": ({"max_grad_norm": 0.0}, (None, True)),
    "max_steps, by length, no last batch": (
        {
            "max_steps": 9,
            "train_sampling_strategy": "group_by_length",
            "dataloader_drop_last": True,
        },
        (),
    ),
    "by epoch, one checkpoint kept": (
        {"eval_strategy": "epoch", "save_strategy": "epoch", "save_total_limit": 1, "data_seed": 7},
        (),
    ),
    "no load of the best, tokens counted, evaluated at first": (
        {
            "load_best_model_at_end": False,
            "include_num_input_tokens_seen": "all",
            "eval_on_start": True,
        },
        (),
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", VARIANTS)
def test_arguments_work_as_in_one_process(tmp_path: Path, name: str) -> None:
    changes, more = VARIANTS[name]
    compared(tmp_path, changes, *more)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"torch_compile": True}, "torch_compile"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        (
            {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"},
            "reduce_lr_on_plateau",
        ),
        ({"optim": "lomo"}, "lomo"),
        ({"bf16_full_eval": True}, "bf16_full_eval"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    from transformers import TrainingArguments

    from penstock.integrations.loops.hugging_face import check_arguments

    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **changes)
    with pytest.raises(BadInput, match=named):
        check_arguments(arguments)


def test_methods_that_would_not_be_called_are_refused() -> None:
    from transformers import Trainer

    from penstock.integrations.loops.hugging_face import PipelineTrainer

    class Mine(Trainer):
        def training_step(self, *arguments: Any, **others: Any) -> torch.Tensor:
            return torch.zeros(())

    class Both(PipelineTrainer, Mine):
        pass

    with pytest.raises(BadInput, match=r"Mine\.training_step would not be called"):
        Both(model(), plan=plan_of)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")
def test_a_plan_says_what_is_computed_again_and_not_the_arguments(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    from penstock.integrations.loops.hugging_face import PipelineTrainer

    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], gradient_checkpointing=True
    )
    trainer = PipelineTrainer(model(), arguments, plan=plan_of)
    assert not trainer.args.gradient_checkpointing
