"""Models and data of the training tests, named by job files that `job_file` writes."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from penstock.runtime.batch_needs import BatchNeeds
from penstock.runtime.callbacks import Event
from penstock.runtime.metrics import StepMetrics
from penstock.runtime.pipeline import Pipeline

WIDTH = 16

SPOILT: list[Pipeline] = []
SLOWED: list[Pipeline] = []


def build() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)
    )


def build_but_on_rank_one() -> nn.Module:
    """The same, but rank 1 fails to build it."""
    if os.environ.get("RANK") == "1":
        raise ValueError("no such model")
    return build()


def build_dropping() -> nn.Module:
    """The same with dropout."""
    return nn.Sequential(build(), nn.Dropout(0.1))


class FailingOnFourRows(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        refuse_four_rows(input)
        return super().forward(input)


@torch.fx.wrap
def refuse_four_rows(input: torch.Tensor) -> None:
    if len(input) == 4:
        raise MemoryError("no room for 4 rows")


def build_failing_on_four_rows() -> nn.Module:
    """The same, but its last layer runs out of memory with micro-batches of four samples."""
    return nn.Sequential(*list(build())[:-1], FailingOnFourRows(64, 4))


def build_for_ever() -> nn.Module:
    """The same, but ranks say that they build it, and never end."""
    if "RANK" in os.environ:
        Path(f"building-{os.environ['RANK']}").touch()
        while True:
            time.sleep(0.1)
    return build()


def build_on_meta() -> nn.Module:
    """The same without values."""
    with torch.device("meta"):
        return build()


def half_build_on_meta() -> nn.Module:
    """The same in half precision."""
    return build_on_meta().to(torch.bfloat16)


class Forked(nn.Module):
    """Computes something else in a stage that leaves the module ``other`` out."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.attributes = vars(other)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``, or twice that."""
        return 2 * x if "forward" in self.attributes else x


def build_forked() -> nn.Module:
    first = nn.Linear(WIDTH, 64)
    return nn.Sequential(
        first, nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4), Forked(first)
    )


def regression(
    split: str, seed: int, start_step: int, batch_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The target is known from the inputs, so the loss falls."""
    step = start_step
    while True:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        x = torch.randn(batch_size, WIDTH, generator=generator)
        yield x, torch.tanh(x[:, :4] + x[:, 4:8])
        step += 1


def blocks_after_three(
    split: str, seed: int, start_step: int, batch_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """No fourth batch on any rank, in a call that no signal of Python ends."""
    for step, batch in enumerate(regression(split, seed, start_step, batch_size), start_step):
        if step == 3 and "RANK" in os.environ:
            time.sleep(10_000)
        yield batch


def blocks_on_rank_one(
    split: str, seed: int, start_step: int, batch_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same on rank 1 alone, while the other goes on."""
    if os.environ.get("RANK") == "1":
        return blocks_after_three(split, seed, start_step, batch_size)
    return regression(split, seed, start_step, batch_size)


def regression_where_used(
    split: str, seed: int, start_step: int, batch_size: int, needs: BatchNeeds | None = None
) -> Iterator[Any]:
    """The same, of which each rank takes what it reads; it writes down what that is."""
    for step, (x, y) in enumerate(regression(split, seed, start_step, batch_size), start_step):
        if needs is None:
            yield x, y
            continue
        with Path(f"read-by-{needs.rank}.txt").open("a") as file:
            file.write(f"{split} {step}: {needs.keys}\n")
        yield needs.read({0: x, 1: y}, range(batch_size), number=step)


def half_regression(
    split: str, seed: int, start_step: int, batch_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same in half precision."""
    for x, y in regression(split, seed, start_step, batch_size):
        yield x.to(torch.bfloat16), y.to(torch.bfloat16)


def count_batches(
    split: str, seed: int, start_step: int, batch_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Only five batches."""
    for step in range(start_step, 5):
        yield next(regression(split, seed, step, batch_size))


def nan_after_three(
    split: str, seed: int, start_step: int, batch_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The fourth batch has a NaN in it."""
    for step, (x, y) in enumerate(regression(split, seed, start_step, batch_size), start_step):
        yield (x * float("nan"), y) if step == 3 else (x, y)


def wider_after_three(
    split: str, seed: int, start_step: int, batch_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The fourth batch has one column more."""
    for step, (x, y) in enumerate(regression(split, seed, start_step, batch_size), start_step):
        yield (torch.cat([x, x[:, :1]], 1), y) if step == 3 else (x, y)


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the first two linear layers of `build`."""
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def job_file(
    folder: Path, data: str = "regression", model: str = "build", **settings: object
) -> Path:
    """A job file beside a copy of this module."""
    (folder / "training_jobs.py").write_text(Path(__file__).read_text())
    keys = {
        "batch_size": 16,
        "micro_batch_sizes": [4],
        "steps": 6,
        "checkpoint_every": 2,
        "evaluate_every": 3,
        **settings,
    }
    lines = [
        f'model = "training_jobs:{model}"',
        f'data = "training_jobs:{data}"',
        'loss = "torch.nn.functional:mse_loss"',
        *(f"{key} = {value}" for key, value in keys.items()),
        "[optimizer]",
        'schedule = "constant"',
        "learning_rate = 0.01",
    ]
    path = folder / "small.toml"
    path.write_text("\n".join(lines))
    return path


def closeness(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A metric: the share of values that are near their targets."""
    return ((output - target).abs() < 0.5).float().mean()


def log_and_stop(pipe: Pipeline, event: Event) -> None:
    """A callback: rank 0 writes the events down, the last rank ends the training at step 4."""
    if pipe.rank == 0:
        with Path("events.txt").open("a") as file:
            file.write(f"{type(event).__name__}\n")
    if isinstance(event, StepMetrics) and event.step == 4 and pipe.rank == 1:
        pipe.stop()


def lose_a_worker(pipe: Pipeline, event: Event) -> None:
    """A callback: after step 5 the second of three ranks is killed."""
    ranks = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if isinstance(event, StepMetrics) and event.step == 5 and ranks == ("1", "3"):
        os.kill(os.getpid(), signal.SIGKILL)


def spoil_a_weight_once(pipe: Pipeline, event: Event) -> None:
    """A callback: after step 3 one weight becomes NaN, the first time that this happens."""
    if isinstance(event, StepMetrics) and event.step == 3 and pipe not in SPOILT:
        with torch.no_grad():
            for name, parameter in pipe.named_parameters():
                if name == "2.weight":
                    parameter[5, 7] = torch.nan
        SPOILT.append(pipe)


def slow_down_rank_one(pipe: Pipeline, event: Event) -> None:
    """A callback: from step 4 on every forward of rank 1 sleeps for 30 ms in its layers."""
    if isinstance(event, StepMetrics) and event.step >= 4 and pipe.rank == 1 and not SLOWED:
        SLOWED.append(pipe)
        for runner in pipe._engine.stages.runners.values():
            call = runner._training_call
            run = call.run

            def slow(*given: Any, run: Any = run) -> Any:
                time.sleep(0.03)
                return run(*given)

            call.run = slow  # type: ignore[method-assign]
