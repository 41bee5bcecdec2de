"""Part 1.4: ranks that share one GPU train as one process, and end together with the cause."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

import torch
from rows import Row, Setting, under
from runtime.matrix_cases import play
from runtime.matrix_plans import Case, torchrun_cases
from torch import nn
from torch.optim import SGD, AdamW

from penstock.device import own_device
from penstock.errors import PenstockError
from penstock.plan.plan import Plan, Stage
from penstock.runtime.options import Safety
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.processes.launch import launch_workers
from penstock.runtime.tables import Constraints

FAILURES = ("is killed", "runs out of memory", "is stopped")
ENDS_WITHIN_S = 20.0
"""Of which a stopped rank takes `WAITS_S`, and starting the processes the most."""

WAITS_S = 5.0
RELATIVE = 1e-9


def here(stand_in: bool, device: str) -> str:
    """The device of this rank's process, where the stand-in is put up first.

    A GPU without a number is this rank's own.
    """
    if stand_in:
        import stand_in_gpu

        stand_in_gpu.install(devices=4)
    return str(own_device(device))


def as_one_process(cases: Sequence[Case], device: str, stand_in: bool) -> dict[str, list[str]]:
    """Faults in each case on this rank."""
    found = play(cases, here(stand_in, device))
    return {str(case): wrong for case, wrong in found.items()}


def launched(function: Callable[..., Any], arguments: tuple[Any, ...], ranks: int) -> Any:
    """The results of ranks on this host."""
    return launch_workers(function, arguments, workers=ranks, threads=1)


def ranks_of_one_gpu(setting: Setting) -> Iterator[Row]:
    """Schedules, models, divided state, no flush; then ranks that fail."""
    for ranks in (2,) if setting.small else (2, 4):
        yield from schedules(setting, ranks)
    yield from models(setting)
    yield from other_ways(setting)
    for failure in FAILURES:
        yield ends_with_the_cause(failure, setting)


def schedules(setting: Setting, ranks: int) -> Iterator[Row]:
    """Every kind of synchronous schedule."""
    cases = list(torchrun_cases(ranks, "shared-memory"))[:: 5 if setting.small else 1]
    yield from judged(f"on {ranks} ranks", cases, ranks, setting)


def models(setting: Setting) -> Iterator[Row]:
    """Tied weights, batch norms, an encoder and a decoder, autocast; cut, and replicated."""
    options: dict[str, Any] = {"micro_batch_rows": 4, "transport": "shared-memory"}
    names = ("gpt2",) if setting.small else ("gpt2", "t5", "convolutions", "resnet", "llama")
    cases = [
        Case("1f1b", replicas, 5, model=name, recompute=len(replicas) == 1, **options)
        for name in names
        for replicas in ((1, 1), (2,))
    ]
    yield from judged("on 2 ranks", cases, 2, setting)


def judged(
    where: str, cases: Sequence[Case], ranks: int, setting: Setting, device: str = "cuda:0"
) -> Iterator[Row]:
    """A row for each case: what differs from one process in float64."""
    results = launched(as_one_process, (tuple(cases), device, setting.stand_in), ranks)
    for case in cases:
        wrong = [what for found in results for what in found[str(case)]]
        examples = {"examples": wrong[:5]} if wrong else {}
        part = "1.4" if device == "cuda:0" else "3"
        yield under(part, f"{case}, {where}: differences", len(wrong), 0, **examples)


def small_model() -> tuple[nn.Module, Any, Any]:
    """Layers in float64, a batch and its loss."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)]
    batch = torch.randn(16, 8).double(), torch.randn(16, 8).double()
    return nn.Sequential(*layers).double(), batch, nn.MSELoss()


def pipeline(plan: Plan, device: str, **options: Any) -> tuple[Pipeline, Any]:
    """A pipeline of the small model."""
    model, batch, loss = small_model()
    placed = tuple(tensor.to(device) for tensor in batch)
    options = {"optimizer": lambda p: AdamW(p, lr=0.01), "verify": "off", **options}
    return Pipeline(
        model.to(device), placed, plan=plan, loss=loss, device=device, **options
    ), placed


def sharded_or_whole(device: str, stand_in: bool) -> list[float]:
    """Losses of replicas that divide the optimizer's state, then of those that do not."""
    device, losses = here(stand_in, device), list[float]()
    for sharded in (True, False):
        plan = Plan((Stage(range(7), (0, 1), (2, 2)),), 4, 4, "1f1b")
        pipe, batch = pipeline(
            plan, device, constraints=Constraints(sharding="optimizer") if sharded else None
        )
        with pipe:
            losses += [pipe.step(batch).loss for _ in range(4)]
    return losses


def streamed(device: str, stand_in: bool, transport: Any = "auto") -> list[float]:
    """Losses without a flush on two ranks, or in one process."""
    device = here(stand_in, device) if device != "cpu" else device
    stages = tuple(Stage(layers, (n,), (4,)) for n, layers in enumerate((range(3), range(3, 7))))
    plan = Plan(stages, 4, 4, "2bw")
    options: Any = {"optimizer": lambda p: SGD(p, lr=0.05), "safety": Safety(transport=transport)}
    pipe, batch = pipeline(plan, device, **options)
    with pipe:
        return [metrics.loss for metrics in pipe.stream([batch] * 4)]


def other_ways(setting: Setting) -> Iterator[Row]:
    """ZeRO-1 against whole states; 2BW against one process on the CPU."""
    given = (str(setting.device), setting.stand_in)
    losses = launched(sharded_or_whole, given, 2)[0]
    yield under("1.4", "divided optimizer state", apart(losses[:4], losses[4:]), RELATIVE)
    found = launched(streamed, given, 2)[0]
    alone = streamed("cpu", False, "in-process")
    yield under("1.4", "2bw without a flush", apart(found, alone), RELATIVE)


def apart(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def failing_rank(failure: str, device: str, stand_in: bool) -> None:
    """Train; rank 1 fails in its third step."""
    device = here(stand_in, device)
    stages = tuple(Stage(layers, (n,), (4,)) for n, layers in enumerate((range(3), range(3, 7))))
    pipe, batch = pipeline(Plan(stages, 4, 4, "1f1b"), device, timeout_s=WAITS_S)
    with pipe:
        for step in range(6):
            if step == 2 and os.environ["RANK"] == "1":
                fail(failure, device)
            pipe.step(batch)


def fail(failure: str, device: str) -> None:
    """End, wait for ever, or request more memory than there is."""
    match failure:
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "is stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case _:
            torch.empty(1 << 42, dtype=torch.uint8, device=device)


def ends_with_the_cause(failure: str, setting: Setting, device: str = "cuda:0") -> Row:
    """Seconds until all have ended, with a message that names the rank and why."""
    words = {"is killed": "SIGKILL", "runs out of memory": "memory", "is stopped": "stop"}
    start_s = perf_counter()
    try:
        launched(failing_rank, (failure, device, setting.stand_in), 2)
        message = "nothing"
    except (PenstockError, RuntimeError, MemoryError) as error:
        message = str(error).partition("\n")[0]
    taken_s = perf_counter() - start_s
    named = words[failure] in message and ("rank 1" in message or "worker 1" in message)
    what = f"a rank {failure}: seconds until all have ended, told why"
    numbers = {"message": message[:300]}
    part = "1.4" if device == "cuda:0" else "3"
    return under(part, what, taken_s if named else float("inf"), ENDS_WITHIN_S, "s", **numbers)
