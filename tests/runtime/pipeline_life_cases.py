"""What two ranks do to see how pipelines begin and end, also where something fails."""

import gc
import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pipelines_of_any_plan import Pipeline
from plain_training import plain_step
from refused import refusal_of
from runtime.pipeline_cases import plan_of
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.capture.chain import Chain
from penstock.capture.layer_graph import LayerGraph
from penstock.errors import PenstockError
from penstock.plan.plan import Plan, Stage
from penstock.runtime.callbacks import Closing, Event
from penstock.runtime.options import Safety
from penstock.runtime.processes.heartbeat import HEARTBEAT
from penstock.runtime.processes.world import connection_is_lost, has_timed_out, join_world
from penstock.runtime.stage.shards import copy_values
from penstock.runtime.tables import Constraints
from penstock.runtime.transport.shared_memory import segments

BATCH = (torch.linspace(-1, 1, 48).view(12, 4), torch.linspace(1, -1, 48).view(12, 4))
SGD = partial(torch.optim.SGD, lr=0.1)


class Layer(nn.Module):
    """A linear layer that raises when told to."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Layer.fails:
            raise ValueError("shape mismatch in the user's code")
        return torch.tanh(self.linear(x))


def model(seed: int = 0, norm: bool = False) -> Chain:
    torch.manual_seed(seed)
    layers = [Layer(), nn.BatchNorm1d(4) if norm else nn.Identity(), Layer()]
    return Chain(layers, loss=functional.mse_loss)


def pipeline(transport: Any, *, seed: int = 0, **options: Any) -> Pipeline:
    given = {"optimizer": SGD, "timeout_s": 30, "safety": Safety(transport=transport), **options}
    return Pipeline(model(seed), BATCH, plan=plan_of(4, (1, 1)), **given)


def outcome(act: Callable[[], object]) -> str:
    """What a call returned or raised, and whether this rank still says that it waits."""
    try:
        found = str(act())
    except PenstockError as error:
        found = f"{type(error).__name__}: {error}"
    except (RuntimeError, ValueError, LookupError) as error:
        found = f"raw {type(error).__name__}: {error}"
    return found if HEARTBEAT.wait is None else f"{found}; still waits for {HEARTBEAT.wait.what()}"


def held() -> dict[str, int]:
    """What a process has open; what is ending, as a thread or a socket, may take a moment."""
    gc.collect()
    with open("/proc/self/status") as status:
        resident = next(line for line in status if line.startswith("VmRSS"))
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "shared": Path("/proc/self/maps").read_text().count("memfd:"),
        "resident": int(resident.split()[1]) * 1024,
    }


COUNTED = ("files", "threads", "shared")
"""What `held` counts, of which nothing may be left."""


def settled(most: dict[str, int]) -> dict[str, int]:
    """`held` once nothing counted is more than in ``most``, or after five seconds."""
    end = time.monotonic() + 5
    found = held()
    while any(found[thing] > most[thing] for thing in COUNTED) and time.monotonic() < end:
        time.sleep(0.02)
        found = held()
    return found


def threads_of_gloo() -> int:
    """How many threads of this process work for process groups."""
    found = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            found += (task / "comm").read_text() == "pt_gloo_runloop\n"
    return found


def threads_ended() -> dict[str, tuple[int, int, str]]:
    """Gloo's threads while a pipeline is open and when it is closed, and what it then refuses."""
    two, replicas = (1, 1), (2,)
    groups = Plan((Stage(range(3), (0,), (4,)),), 3, 4, "1f1b", tensor_groups=((0, 1),))
    messages = {"safety": Safety(transport="process-groups")}
    table: Any = {"0": "colwise", "2": "rowwise"}
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    divided = capture_model(plain, BATCH, loss=functional.mse_loss, tensor_parallel=table)
    cases: dict[str, tuple[nn.Module | LayerGraph, Plan, dict[str, Any]]] = {
        "shared memory": (model(), plan_of(4, two), {}),
        "messages": (model(), plan_of(4, two), messages),
        "norm": (model(norm=True), plan_of(4, replicas), messages),
        "shards of state": (
            model(),
            plan_of(4, replicas),
            {"constraints": Constraints(sharding="optimizer")},
        ),
        "no flush": (model(), plan_of(4, replicas, "pipedream"), {}),
        "tensor groups": (divided, groups, {}),
    }
    found: dict[str, tuple[int, int, str]] = {}
    closed: list[Pipeline] = []
    for name, (module, plan, options) in cases.items():
        before = threads_of_gloo()
        with Pipeline(module, BATCH, plan=plan, optimizer=SGD, timeout_s=30, **options) as pipe:
            pipe.step(BATCH)
            opened = threads_of_gloo()
        closed.append(pipe)
        found[name] = opened - before, threads_of_gloo() - before, outcome(pipe.model_state_dict)
    return found


def left_while_waited_for() -> float:
    """How long rank 0 takes to leave while its thread of Gloo waits for rank 1."""
    world = join_world("cpu", 30.0)
    store = dist.distributed_c10d._get_default_store()
    if world.rank == 0:
        dist.all_reduce(torch.zeros(1), group=world.control, async_op=True)
    started_s = time.monotonic()
    if world.rank:
        store.get("rank 0 has left")
    world.leave()
    store.set("rank 0 has left", "")
    return time.monotonic() - started_s


def no_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The user's function fails, on one rank only."""
    if os.environ["RANK"] == "1":
        raise LookupError("no optimizer of this name")
    return SGD(parameters)


def fail_in_a_step(transport: str) -> None:
    with pipeline(transport) as pipe:
        Layer.fails = pipe.rank == 1
        try:
            pipe.step(BATCH)
        finally:
            Layer.fails = False


def fail_when_built(transport: str) -> None:
    pipeline(transport, optimizer=no_optimizer)


def fail_to_open_memory(transport: str) -> None:
    """One rank may not open the other's memory, so all use process groups."""
    opened = segments.open_memory

    def refused(process: int, handle: int, size_bytes: int) -> Any:
        if os.environ["RANK"] == "1" and process != os.getpid():
            raise PermissionError("not allowed")
        return opened(process, handle, size_bytes)

    segments.open_memory = refused
    try:
        with pipeline("auto") as pipe:
            pipe.step(BATCH)
    finally:
        segments.open_memory = opened


FAILURES = {
    "in a step": fail_in_a_step,
    "when built": fail_when_built,
    "to open memory": fail_to_open_memory,
}


def failed_pipelines(
    transport: str, count: int
) -> dict[str, tuple[set[str], list[dict[str, int]]]]:
    """What is raised, and what is held after the second and after ``count`` failed pipelines."""
    found: dict[str, tuple[set[str], list[dict[str, int]]]] = {}
    for name, fail in FAILURES.items():
        texts, states = set[str](), list[dict[str, int]]()
        for number in range(count):
            texts.add(outcome(partial(fail, transport)))
            if number == 1:
                states.append(held())
        states.append(settled(states[0]))
        found[name] = texts, states
    return found


def trained_alone(seed: int, steps: int) -> dict[str, torch.Tensor]:
    whole = model(seed)
    optimizer = SGD(whole.parameters())
    for _ in range(steps):
        plain_step(optimizer, functional.mse_loss(whole(BATCH[0]), BATCH[1]))
    return whole.state_dict()


def two_at_once(transport: str) -> list[str]:
    """Two pipelines in one process, trained in turns and closed in either order."""
    wrong: list[str] = []
    for first_closed in (0, 1):
        pipes = [pipeline(transport, seed=seed) for seed in (1, 2)]
        for pipe in pipes:
            pipe.step(BATCH)
        pipes[first_closed].close()
        other = pipes[1 - first_closed]
        other.step(BATCH)
        if not HEARTBEAT.action().endswith(f" of stage {other.rank}"):
            wrong.append(
                f"{first_closed} closed first: the other says it is at '{HEARTBEAT.action()}'"
            )
        seed = 2 - first_closed
        expected = trained_alone(seed, 2)
        for name, tensor in other.named_parameters():
            if not torch.allclose(tensor, expected[name], atol=1e-6):
                wrong.append(f"{first_closed} closed first: {name} differs")
        other.close()
        if dist.is_initialized():
            wrong.append(f"{first_closed} closed first: the default group is left")
    with pipeline(transport) as pipe:
        pipe.step(BATCH)
    return wrong


def one_model_twice() -> list[str]:
    """What is said of a second pipeline of a model while the first is open, and after it."""
    own = model(1)
    said, plan = list[str](), plan_of(4, (1, 1))
    with pipeline("shared-memory", seed=1):
        first = Pipeline(own, BATCH, plan=plan, optimizer=SGD)
        first.step(BATCH)
        around = nn.Sequential(own.get_submodule("0"), *(Layer() for _ in range(2)))
        for shares in (own, around):
            loss = None if shares is own else functional.mse_loss
            given = {"loss": loss, "optimizer": SGD}
            said.append(outcome(partial(Pipeline, shares, BATCH, plan=plan, **given)))
        loss = first.step(BATCH).loss
        first.close(gather=True)
        with Pipeline(own, BATCH, plan=plan, optimizer=SGD) as after:
            said.append("fell" if after.step(BATCH).loss < loss else "did not fall")
    return said


def callback_that_raises() -> list[object]:
    """What is raised by `close`, which callbacks were told, and whether anything is left."""
    told: list[str] = []

    def first(_: Pipeline, event: Event) -> None:
        if isinstance(event, Closing):
            raise ValueError("no space left for the log")

    def second(_: Pipeline, event: Event) -> None:
        told.append(type(event).__name__)

    pipe = pipeline("auto")
    pipe.notify(first, second)
    raised = outcome(pipe.close)
    del pipe
    return [raised, told, dist.is_initialized(), held()["shared"]]


def agreements() -> list[str]:
    """What ranks get where one of them raises what nobody expects."""
    world = join_world("cpu", 30)

    def make() -> str:
        if world.rank == 1:
            raise IndexError("list index out of range")
        return "made"

    found = [
        outcome(lambda: world.all_succeed(make)),
        outcome(lambda: world.all_succeed(lambda: "again")),
    ]
    world.leave()
    return found


class LostOutputs(dict[tuple[int, int], torch.Tensor]):
    """Fails when its outputs are read."""

    def __getitem__(self, place: tuple[int, int]) -> torch.Tensor:
        raise ValueError("the outputs are gone")


def lost_predictions() -> str:
    """Rank 1 fails while outputs are gathered."""
    with pipeline("auto") as pipe:
        if pipe.rank == 1:
            pipe._connection.inference._outputs = LostOutputs()
        return outcome(lambda: pipe.predict(BATCH[0]))


def late_ranks() -> dict[str, tuple[str, float]]:
    """What rank 0 gets, and after how many seconds, where rank 1 does not take part in time."""
    found: dict[str, tuple[str, float]] = {}

    def gather_what_never_comes() -> object:
        if world.rank == 0:
            return world.gather_tensors({})
        # Rank 1 says what it has and then sends nothing.
        return world.all_gather({"weight": (torch.Size([4]), torch.float32)})

    def copy_what_never_comes() -> object:
        group = world.new_group([0, 1])
        assert group is not None
        world.barrier()
        return copy_values(torch.zeros(4), 1, group, world) if world.rank == 0 else None

    for name, act in (("gathered", gather_what_never_comes), ("copied", copy_what_never_comes)):
        world = join_world("cpu", 1.0)
        started_s = time.monotonic()
        text = outcome(act)
        found[name] = text, time.monotonic() - started_s
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{name} on rank {world.rank}", "done")
        store.wait([f"{name} on rank 0", f"{name} on rank 1"])
        world.leave()
    return found


def texts_of_torch() -> list[tuple[bool, bool]]:
    """Real errors of Gloo on rank 0: whether each is a timeout, whether a lost connection."""
    world = join_world("cpu", 1.0)
    groups = [world.new_group([0, 1]) for _ in range(3)]
    store = dist.distributed_c10d._get_default_store()

    def late_sum() -> None:
        dist.all_reduce(torch.zeros(1), group=groups[0])

    def late_message() -> None:
        work = dist.irecv(torch.zeros(1), 1, group=groups[1])
        assert work is not None
        work.wait(timedelta(seconds=1))

    def lost() -> None:
        store.get("rank 1 has left")
        dist.all_reduce(torch.zeros(1), group=groups[2])

    found: list[tuple[bool, bool]] = []
    if world.rank == 0:
        for act in (late_sum, late_message):
            found.append(judged(act))
        store.set("rank 0 is ready", "")
        found.append(judged(lost))
        store.set("rank 0 is done", "")
    else:
        store.get("rank 0 is ready")
        last = groups.pop()
        assert last is not None
        world.abandon(last)
        del last
        gc.collect()
        store.set("rank 1 has left", "")
        store.get("rank 0 is done")
    return found


def judged(act: Callable[[], object]) -> tuple[bool, bool]:
    try:
        act()
    except RuntimeError as error:
        return has_timed_out(error), connection_is_lost(error)
    return False, False


def groups_of(norm: bool) -> int:
    """How many groups a pipeline with a replicated stage makes."""
    plan = plan_of(4, (2,))
    with Pipeline(model(norm=norm), BATCH, plan=plan, optimizer=SGD, timeout_s=30) as pipe:
        pipe.step(BATCH)
        return len(pipe._engine.world.groups)


def made_again() -> tuple[str, bool, list[float]]:
    """A second pipeline of a trained model that was given back, or was not; and its losses."""
    torch.manual_seed(0)
    own = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    given: dict[str, Any] = {"loss": functional.mse_loss, "optimizer": SGD, "timeout_s": 30}
    plans = plan_of(3, (1, 1)), plan_of(3, (2,))
    refused, losses = "", list[float]()
    objects = list(map(id, own.parameters()))
    for number, gather in enumerate((True, False, False)):
        try:
            with Pipeline(own, BATCH, plan=plans[number % 2], **given) as pipe:
                losses += [pipe.step(BATCH).loss for _ in range(2)]
                pipe.close(gather=gather)
                if number == 1:  # both ranks have held all of it
                    break
        except PenstockError as error:
            refused = str(error)
    whole = all(type(p) is nn.Parameter and p.isfinite().all() for p in own.parameters())
    same = whole and list(map(id, own.parameters())) == objects
    with Pipeline(own, BATCH, plan=plans[0], **given) as pipe:
        pipe.step(BATCH)
    refused = refusal_of(Pipeline, own, BATCH, plan=plans[1], **given)
    return refused, same, losses


def lives(count: int) -> dict[str, Any]:
    """All of these, one after another in the same processes."""
    # The first pipeline loads and opens what stays for the process.
    two_at_once("shared-memory")
    return {
        "threads": threads_ended(),
        "left": left_while_waited_for(),
        "two at once": two_at_once("shared-memory") + two_at_once("process-groups"),
        "one model": one_model_twice(),
        "failed": {t: failed_pipelines(t, count) for t in ("shared-memory", "process-groups")},
        "callback": callback_that_raises(),
        "agreements": agreements(),
        "prediction": lost_predictions(),
        "groups": [groups_of(norm) for norm in (False, True)],
        "late": late_ranks(),
        "texts": texts_of_torch(),
        "again": made_again(),
    }


def failed(transport: str, count: int) -> dict[str, Any]:
    """Only the failed pipelines."""
    two_at_once("shared-memory")
    return failed_pipelines(transport, count)


def all_stages_in_one_process() -> str:
    """What is said of a pipeline whose stages are all to be in one process of two."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = Plan((Stage(range(1), (0,), (4,)), Stage(range(1, 3), (1,), (4,))), 3, 4, "gpipe")
    safety = Safety(transport="in-process")
    return refusal_of(Pipeline, model, BATCH, plan=plan, loss=functional.mse_loss, safety=safety)
