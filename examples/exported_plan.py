"""Runs a plan in torch.distributed.pipelining, as `penstock export --to torch` wrote it.

torchrun --nproc-per-node 2 examples/exported_plan.py layout.json
"""

import copy
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

WORDS, WIDTH, LENGTH, BLOCKS = 50, 32, 16, 8


class Block(nn.Module):
    """A transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention with two heads, then the MLP."""
        heads = (
            part.unflatten(-1, (2, -1)).transpose(1, 2)
            for part in self.qkv(self.ln_1(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.ln_2(x))))


class Gpt(nn.Module):
    """A small GPT-2 whose forward also works where a stage has only some of its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.ln_f, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits from words, on the first stage, or from what the stage before sent."""
        if not x.is_floating_point():
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean over all words."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def stage_module(model: nn.Module, names: list[str]) -> nn.Module:
    """A copy of the model in which the modules of other stages do nothing."""
    model = copy.deepcopy(model)

    def keep(module: nn.Module, path: str) -> None:
        for name, child in list(module.named_children()):
            if path + name in names:
                continue
            if isinstance(child, nn.ModuleList):
                keep(child, f"{path}{name}.")
            else:
                setattr(module, name, nn.Identity())

    keep(model, "")
    return model


def schedule_of(
    model: nn.Module, layout_file: Path
) -> tuple[_PipelineScheduleRuntime, dict[int, nn.Module]]:
    """This rank's part of the exported plan, and its stages by number."""
    layout = json.loads(layout_file.read_text())
    count = len(layout["stages"])
    modules = {
        stage: stage_module(model, layout["stages"][stage])
        for stage in range(count)
        if layout["stage_to_rank"][stage] == dist.get_rank()
    }
    device = torch.device("cpu")
    stages = [PipelineStage(module, stage, count, device) for stage, module in modules.items()]
    schedule = _PipelineScheduleRuntime(stages, layout["n_microbatches"], loss_fn=loss)
    schedule._load_csv(str(layout_file.with_name(layout["schedule_csv"])))
    return schedule, modules


def step(
    schedule: _PipelineScheduleRuntime,
    modules: dict[int, nn.Module],
    words: torch.Tensor,
    target: torch.Tensor,
) -> list[torch.Tensor]:
    """One iteration; the losses of all micro-batches where the last stage is."""
    losses: list[torch.Tensor] = []
    last = schedule._num_stages - 1
    given = (words,) if 0 in modules else ()
    named = {"target": target, "losses": losses} if last in modules else {}
    schedule.step(*given, **named)
    return losses


def main() -> None:
    """Train for five steps."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, words = Gpt(), torch.randint(WORDS, (16, LENGTH + 1))
    schedule, modules = schedule_of(model, Path(sys.argv[1]))
    parameters = [p for module in modules.values() for p in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    for number in range(5):
        optimizer.zero_grad()
        losses = step(schedule, modules, words[:, :-1], words[:, 1:])
        optimizer.step()
        if losses:
            print(f"step {number}: loss {torch.stack(losses).mean():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
