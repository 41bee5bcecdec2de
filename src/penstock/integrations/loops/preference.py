"""TRL's training on preferences (DPO), in which a pipeline takes the steps."""

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from penstock.errors import BadInput
from penstock.integrations.loops.hugging_face import PipelineTrainer, arguments_in

try:
    from trl.trainer.dpo_trainer import DPOTrainer
except ImportError as missing:
    raise ImportError(
        f"penstock.integrations.loops.preference needs TRL ({missing}); "
        "install it with pip install trl"
    ) from missing

OF_PAIRS = (
    *("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"),
    *("logps/chosen", "logps/rejected"),
)
"""Logged values: means over pairs, which are those of their slices."""


class Logged:
    """A placeholder for what the loss only logs; a mean over pairs is kept as its ``values``."""

    def __init__(self, values: torch.Tensor | None = None) -> None:
        self.values = values

    def same(self, *_: Any, **__: Any) -> "Logged":
        return self

    sum = mean = item = detach = same
    __getitem__ = __mul__ = __and__ = __floordiv__ = __radd__ = same

    def chunk(self, parts: int, **_: Any) -> list["Logged"]:
        return [self] * parts

    def __gt__(self, other: object) -> bool:
        return False


class Scores:
    """Scores that TRL's fused head gives the loss, from logits; the rest is only logged."""

    def __init__(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        words = labels[:, 1:]
        found = logits[:, :-1].float().log_softmax(-1)
        scores = found.gather(2, words.clamp(min=0)[..., None]).squeeze(-1)
        self.log_probs = scores.masked_fill(words == -100, 0.0)
        self.entropy = self.mean_logits = self.is_top1 = Logged()


class PipelineDPOTrainer(PipelineTrainer, DPOTrainer):
    """TRL's `DPOTrainer` whose steps a pipeline takes; see `PipelineTrainer`.

    The reference's scores are computed before training (``precompute_ref_log_probs=True``), by
    whole models on all ranks. A pair is one sample, so the plan's batch counts pairs. Of what the
    loss logs, rewards and log-probabilities of the answers stay, which are means over pairs.

    Raises:
        BadInput: an argument that cannot be followed, which is named.
    """

    def __init__(self, *arguments: Any, **others: Any) -> None:
        check_preferences(arguments_in(arguments, others))
        if others.get("compute_metrics") is not None:
            raise BadInput("compute_metrics is not for a pipeline of DPO, which keeps no logits")
        super().__init__(*arguments, **others)
        means = {name: partial(mean_of, name) for name in OF_PAIRS}
        self._pipeline["metrics"] = means | dict(self._pipeline.get("metrics", {}))

    def batch_of(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Chosen and rejected answers side by side, so that a pair is one sample."""
        batch: dict[str, Any] = {}
        for name, value in inputs.items():
            if name.startswith("ref_"):
                batch[name] = value
            else:
                batch[f"chosen {name}"], batch[f"rejected {name}"] = value.chunk(2)
        return batch

    def loss_and_outputs(self, model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        """TRL's loss of scores from the model's logits, and what it logs of each pair."""
        joined = {name: value for name, value in inputs.items() if name.startswith("ref_")}
        for name in (n.removeprefix("chosen ") for n in inputs if n.startswith("chosen ")):
            joined[name] = torch.cat([inputs[f"chosen {name}"], inputs[f"rejected {name}"]])

        def scored(labels: torch.Tensor, fused_lm_head: bool, **some: Any) -> Scores:
            return Scores(model(**some).logits, labels)

        # TRL's function reads the trainer only; what it writes there is not the trainer's.
        logged: defaultdict[str, list[Any]] = defaultdict(list)
        gathering = SimpleNamespace(
            device=self.accelerator.device, gather=Logged, gather_for_metrics=lambda _: Logged()
        )
        reader: Any = SimpleNamespace(**vars(self) | {"accelerator": gathering})
        reader._metrics, reader._total_train_tokens = {"train": logged, "eval": logged}, 0
        loss = DPOTrainer._compute_loss(reader, scored, joined, return_outputs=False)
        return {"loss": loss} | {name: logged[name][-1].values for name in OF_PAIRS}

    def note(self, metrics: Mapping[str, float]) -> None:
        kept = self._metrics["train" if cast(nn.Module, self.model).training else "eval"]
        for name, value in metrics.items():
            kept[name].append(value)

    def _prepare_for_training(self, *arguments: Any, **others: Any) -> Any:
        for part in cast(nn.Module, self.model).modules():
            vars(part).pop("forward", None)  # TRL's fused head, which needs no logits
        return super()._prepare_for_training(*arguments, **others)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        if self.pipe is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        return self._evaluated(inputs), None, None


def mean_of(name: str, output: Any, batch: Any) -> torch.Tensor:
    return output[name].float().mean()


def check_preferences(args: Any) -> None:
    """Raise `BadInput` for an argument of `DPOConfig` that a pipeline cannot follow."""
    if not getattr(args, "precompute_ref_log_probs", False):
        raise BadInput(
            "a pipeline of DPO has no reference model; compute its scores before training with "
            "DPOConfig(precompute_ref_log_probs=True)"
        )
    for name in ("use_weighting", "activation_offloading", "router_aux_loss_coef"):
        if getattr(args, name, None):
            raise BadInput(f"{name} is not for a pipeline of DPO; leave it out")
    for kind in ("sft", "aot", "aot_unpaired"):
        if kind in args.loss_type:
            raise BadInput(f"loss_type '{kind}' is no mean over pairs; choose another")
