"""TRL's DPO in a pipeline: the losses and rewards of TRL's own trainer in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.loops.preference_cases import preferences, trained

from penstock.errors import BadInput
from penstock.runtime.processes.launch import launch_workers

pytest.importorskip("trl")

CLOSE = {"rel": 1e-4, "abs": 1e-6}
"""Float32: TRL's head sums logits in another order, and a first reward is their difference, 0."""

COMPARED = {
    *("loss", "grad_norm", "learning_rate", "epoch", "step", "eval_loss", "train_loss"),
    *(
        f"{when}rewards/{what}"
        for when in ("", "eval_")
        for what in ("chosen", "rejected", "margins")
    ),
    *(f"{when}logps/{what}" for when in ("", "eval_") for what in ("chosen", "rejected")),
}


def compared(tmp_path: Path, changes: dict[str, Any]) -> None:
    preferences(tmp_path)
    (log, weights), *_ = launch_workers(
        trained, ("plain", str(tmp_path / "plain"), str(tmp_path), changes), workers=1, threads=1
    )
    (found, own), _ = launch_workers(
        trained, ("own", str(tmp_path / "own"), str(tmp_path), changes), workers=2, threads=1
    )
    assert len(found) == len(log) == 9
    told: set[str] = set()
    for row, other in zip(found, log, strict=True):
        keys = sorted(COMPARED & other.keys())
        told |= set(keys)
        assert [row[k] for k in keys] == pytest.approx([other[k] for k in keys], **CLOSE)
    assert told == COMPARED
    # The first step's margins are 0 but for rounding, so that which is larger says nothing.
    assert [row.get("rewards/accuracies") for row in found[1:]] == [
        row.get("rewards/accuracies") for row in log[1:]
    ]
    assert weights.keys() == own.keys()
    for name, weight in weights.items():
        assert torch.allclose(own[name], weight, rtol=0, atol=1e-4), name


@pytest.mark.timeout(600)
def test_losses_rewards_and_weights_are_those_of_one_process(tmp_path: Path) -> None:
    """Pairs of different lengths, accumulated, and a last batch that is not full."""
    compared(tmp_path, {})


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "changes",
    [
        {"loss_type": ["ipo"]},
        {"loss_type": ["hinge", "robust"], "loss_weights": [0.7, 0.3], "label_smoothing": 0.1},
        {"ld_alpha": 0.5, "f_divergence_type": "js_divergence"},
    ],
    ids=["ipo", "hinge and robust", "by length, another divergence"],
)
def test_other_losses_are_those_of_one_process(tmp_path: Path, changes: dict[str, Any]) -> None:
    compared(tmp_path, changes)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, "precompute_ref_log_probs=True"),
        ({"precompute_ref_log_probs": True, "use_weighting": True}, "use_weighting"),
        ({"precompute_ref_log_probs": True, "loss_type": ["sft"]}, "loss_type 'sft'"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    import trl

    from penstock.integrations.loops.preference import check_preferences

    arguments = trl.DPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[], **changes)
    with pytest.raises(BadInput, match=named):
        check_preferences(arguments)
