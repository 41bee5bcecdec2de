"""Pipelines side by side that train alone and meet every N steps: local SGD and DiLoCo.

Each has its own weights and its own optimizer, and no gradient leaves it. When they meet, every
pipeline continues from the mean of their weights (local SGD: Stich, Local SGD Converges Fast and
Communicates Little, ICLR 2019), or from an outer step towards it (DiLoCo: Douillard et al.,
arXiv:2311.08105, 2023): the outer gradient is the weights of the last meeting minus the mean, and
SGD with Nesterov momentum takes the step. Optimizers of the pipelines keep their state. A pipeline
counts in the mean as its slices do in a batch (as clients count in FedAvg: McMahan et al.,
Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017).
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.errors import BadInput
from penstock.runtime.engine import Engine
from penstock.runtime.micro_batches import cut_batch
from penstock.runtime.options import Update
from penstock.text import counted


class Meetings:
    """Meetings of this rank's weights with those of the other pipelines, every ``every`` steps.

    ``met``: no step was taken since the pipelines met, so all have the same weights.
    ``last_met`` are the weights after that, by name, if there is an outer step.
    """

    def __init__(self, engine: Engine, update: Update) -> None:
        self.every, self.met = update.meet_every, True
        self.last_met: dict[str, nn.Parameter] = {}
        self._engine, self._trained = engine, dict(engine.held.stepped_parameters())
        self._outer: torch.optim.SGD | None = None
        stage = engine.plan.stages[0]
        self._share = stage.slices[engine.pipeline] / sum(stage.slices)
        rate, momentum = update.outer_learning_rate, update.outer_momentum
        if (rate, momentum) != (1.0, 0.0):
            self.last_met = {n: nn.Parameter(p.detach().clone()) for n, p in self._trained.items()}
            # The optimizer of a stage without parameters has nothing to step.
            stepped = list(self.last_met.values()) or [nn.Parameter(torch.zeros(0))]
            self._outer = torch.optim.SGD(
                stepped, lr=rate, momentum=momentum, nesterov=momentum > 0
            )

    def check_rows(self, samples: Sequence[int]) -> None:
        """Raise `BadInput` if a pipeline has no row of a step on batches of these sizes."""
        cuts = [cut_batch(self._engine.plan, size) for size in samples]
        pipelines = len(self._engine.pipelines)
        for pipeline in range(pipelines):
            if not any(slices[0][pipeline] for cut in cuts for slices in cut.slices):
                raise BadInput(
                    f"a step on {counted(sum(samples), 'sample')} has none for pipeline "
                    f"{pipeline}, and each of {pipelines} trains on rows of its own; give larger "
                    f"batches"
                )

    def after(self, steps: int) -> None:
        """Meet if it is time to, after step number ``steps``; all ranks must call this."""
        self.met = False
        if steps % self.every == 0:
            self.meet()

    @torch.no_grad()
    def meet(self) -> None:
        """Meet now; all ranks must call this. The memory of gradients holds what is summed."""
        engine, begun = self._engine, time.perf_counter()
        with engine.failures.shared():
            engine.buckets.zero()
            sums = {name: p.grad for name, p in self._trained.items() if p.grad is not None}
            for name, own in sums.items():
                parameter, last = self._trained[name], self.last_met.get(name)
                own.copy_(parameter if last is None else last - parameter).mul_(self._share)
            engine.buckets.finish()
        if self._outer is not None:
            for name, last in self.last_met.items():
                last.grad = sums[name].to(last.dtype)
            self._outer.step()
        for name, mean in sums.items():
            self._trained[name].copy_(self.last_met.get(name, mean))
        self.met = True
        engine.numbers.optimizer_s += time.perf_counter() - begun

    @torch.no_grad()
    def go_on_from_here(self) -> None:
        """Set the last meeting's weights to the present ones: the user's loop has changed them."""
        for name, last in self.last_met.items():
            last.copy_(self._trained[name])

    def check_met(self, what: str) -> None:
        """Raise `BadInput` if the pipelines have other weights, and ``what`` needs one model's."""
        if not self.met:
            raise BadInput(
                f"{what} needs weights that all pipelines share, and they have trained alone since "
                f"they met (every {counted(self.every, 'step')}); call meet() before, on all ranks"
            )

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights of the last meeting and the outer momentum, by name; of all pipelines."""
        found: dict[str, torch.Tensor] = {}
        for name, last in self.last_met.items():
            found[f"outer.{name}.weights"] = last.detach()
            buffer = self._outer.state[last].get("momentum_buffer") if self._outer else None
            if buffer is not None:
                found[f"outer.{name}.momentum"] = buffer
        return found

    def state(self) -> dict[str, Any]:
        """The rest of the state as JSON values."""
        outer = self._outer is not None
        return {"pipelines": len(self._engine.pipelines), "met": self.met, "outer": outer}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any] | None) -> None:
        """Restore them; without an outer step's, this begins with the weights as they are now."""
        # Another number of pipelines continues from the weights of the first.
        fits = state is not None and state["pipelines"] == len(self._engine.pipelines)
        self.met = not fits or state is None or bool(state["met"])
        if self._outer is not None and state is not None and not (self.met or state["outer"]):
            raise BadInput(
                "the checkpoint was written between meetings that have no outer step; go on "
                "without one (outer_learning_rate=1, outer_momentum=0) and change it in a meeting"
            )
        for name, last in self.last_met.items():
            last.copy_(tensors.get(f"outer.{name}.weights", self._trained[name]))
            momentum = tensors.get(f"outer.{name}.momentum")
            assert self._outer is not None
            self._outer.state[last].clear()
            if momentum is not None:
                self._outer.state[last]["momentum_buffer"] = momentum.to(last).clone()
