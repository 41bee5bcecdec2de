"""What the worker processes of the test of a step's walk run."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import penstock
from penstock.capture.capture import capture_model
from penstock.plan.plan import Plan, Stage
from penstock.runtime.pipeline import Pipeline

RUNTIME = Path(penstock.__file__).parent / "runtime"


def entered_by_the_second_step() -> set[str]:
    """The files of the runtime, on this rank, of which a function was called."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    batch = (torch.randn(4, 4), torch.randint(3, (4,)))
    graph = capture_model(model, batch, loss=nn.CrossEntropyLoss())
    layers = len(graph.layer_names)
    cuts = range(layers // 2), range(layers // 2, layers)
    plan = Plan(tuple(Stage(cut, (n,), (2,)) for n, cut in enumerate(cuts)), 2, 2, "1f1b")
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(RUNTIME):
            files.add(path.relative_to(RUNTIME).as_posix())

    with Pipeline(
        graph,
        plan,
        batch,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        verify="off",
        safety=penstock.Safety(transport="process-groups"),
    ) as pipe:
        pipe.step(batch)
        sys.setprofile(note)
        pipe.step(batch)
        sys.setprofile(None)
    return files
