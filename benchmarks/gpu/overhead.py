"""Part 2.4: what an action costs the host, and how fast copies between host and device are."""

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from rows import Row, Setting, told, under
from torch import nn
from torch.optim import SGD

from penstock.plan.plan import Plan, Stage
from penstock.runtime.options import Safety
from penstock.runtime.pipeline import Pipeline

MICRO_BATCHES, STAGES = 32, 4
ACTION_BAR_S = 500e-6
"""A layer of a transformer takes a GPU some milliseconds."""
PINNED_BAR = 10e9
"""Half of what PCIe 4.0 with 16 lanes carries."""


def overhead_and_copies(setting: Setting) -> Iterator[Row]:
    """Seconds of the host, and bytes a second."""
    yield from overhead(setting)
    size = (1 << 20) if setting.small else (256 << 20)
    host = torch.empty(size, dtype=torch.uint8)
    device = torch.empty(size, dtype=torch.uint8, device=setting.device)
    pinned = host.pin_memory()
    copies: dict[str, Callable[[], Any]] = {
        "pinned host to device": lambda: device.copy_(pinned, non_blocking=True),
        "device to pinned host": lambda: pinned.copy_(device, non_blocking=True),
        "pageable host to device": lambda: device.copy_(host),
        "device to pageable host": lambda: host.copy_(device),
    }
    for name, copy in copies.items():
        rate = size / seconds_of(copy)
        found = f"{rate / 1e9:.1f} GB/s"
        if "pinned" not in name:
            yield told("2.4", name, found, bytes_per_s=rate)
            continue
        outcome = "right" if rate >= PINNED_BAR else "wrong"
        bar = f">= {PINNED_BAR / 1e9:g} GB/s"
        row = Row("2.4", name, found, outcome, bar, {"bytes_per_s": rate})
        yield setting.by_device(row)


def seconds_of(act: Callable[[], Any]) -> float:
    """The median of five, each until the device has done it."""
    found: list[float] = []
    for _ in range(6):
        torch.cuda.synchronize()
        start_s = perf_counter()
        act()
        torch.cuda.synchronize()
        found.append(perf_counter() - start_s)
    return median(found[1:])


def overhead(setting: Setting) -> Iterator[Row]:
    """Layers so small that a step waits for the host alone; and a checkpoint of large ones."""
    width = 64 if setting.small else 4096
    layers = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(STAGES)]
    batch = torch.randn(MICRO_BATCHES, 8), torch.randn(MICRO_BATCHES, 8)
    stages = tuple(Stage(range(n, n + 1 + (n == STAGES - 1)), (n,), (1,)) for n in range(STAGES))
    plan = Plan(stages, MICRO_BATCHES, 1, "1f1b")
    options: dict[str, Any] = {"verify": "off", "device": setting.device, "loss": nn.MSELoss()}
    options |= {"optimizer": lambda p: SGD(p, lr=1e-3), "safety": Safety(transport="in-process")}
    with Pipeline(nn.Sequential(*layers), batch, plan=plan, **options) as pipe:
        taken_s = seconds_of(lambda: pipe.step(batch))
    each_s = taken_s / (2 * MICRO_BATCHES * STAGES)
    row = under("2.4", "the host's share of an action", each_s, ACTION_BAR_S, "s", step_s=taken_s)
    yield setting.by_device(row)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))
    wide = torch.randn(4, width), torch.randn(4, width)
    plan = Plan((Stage(range(9), (0,), (2,)),), 2, 2, "1f1b")
    size_bytes = sum(p.nbytes for p in model.parameters())
    with (
        TemporaryDirectory() as place,
        Pipeline(model, wide, plan=plan, **(options | {"safety": Safety()})) as pipe,
    ):
        pipe.step(wide)
        start_s = perf_counter()
        pipe.save(Path(place) / "checkpoint")
        rate = size_bytes / (perf_counter() - start_s)
    yield told("2.4", "a checkpoint is saved at", f"{rate / 1e9:.2f} GB/s", bytes_per_s=rate)
