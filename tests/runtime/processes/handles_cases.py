"""What a process still holds after steps, and after a pipeline is closed."""

import gc
import types
from typing import Any

import torch
import torch.distributed as dist
from pipelines_of_any_plan import Pipeline
from runtime.matrix_cases import batch_of, captured, make_optimizer
from runtime.matrix_plans import Case
from runtime.pipeline_life_cases import held

from penstock.runtime.options import Safety

STEPS, PIPELINES = 2, 2

CASES = (
    Case("1f1b", (2, 1), 4),
    Case("zb-v", (1, 1, 1), 4, 2, "folded", recompute=True),
)


def operations(root: object) -> list[dist.Work]:
    """The handles of communication that can be reached from ``root``."""
    seen: set[int] = set()
    left, found = [root], []
    while left:
        item = left.pop()
        if id(item) in seen or isinstance(item, type | types.ModuleType | types.FrameType):
            continue
        seen.add(id(item))
        if isinstance(item, dist.Work):
            found.append(item)
        if isinstance(item, types.FunctionType):
            # Not the globals: they hold everything.
            left += [item.__closure__, item.__defaults__]
        else:
            left += gc.get_referents(item)
    return found


def after_steps_and_after_closing(transport: str) -> dict[str, Any]:
    """By case: handles after the steps of each pipeline, and what is held after each is closed."""
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for case in CASES:
        subject, graph = captured(case.model, True)
        plan = case.plan(len(graph.layer_names))
        handles: list[int] = []
        closed: list[dict[str, int]] = []
        working: dict[str, int] = {}
        for _ in range(PIPELINES):
            with Pipeline(
                graph,
                batch_of(subject, plan.global_batch, True),
                plan=plan,
                optimizer=make_optimizer("sgd"),
                safety=Safety(transport=transport),
                timeout_s=60,
            ) as pipe:
                for step in range(STEPS):
                    pipe.step(batch_of(subject, plan.global_batch - step, True))
                handles.append(len(operations(pipe)))
                pipe.evaluate(batch_of(subject, 5, True))
                working = held()
                pipe.close(gather=True)
            del pipe
            closed.append(held())
        found[str(case)] = {"handles": handles, "closed": closed, "working": working}
    return found


def handle_under_way() -> tuple[int, int]:
    """How many handles `operations` finds in an object that holds one, and then none."""
    dist.init_process_group("gloo")
    tensor = torch.ones(3)
    holder = types.SimpleNamespace(deep=[{"work": dist.all_reduce(tensor, async_op=True)}])
    before = len(operations(holder))
    holder.deep[0].pop("work").wait()
    return before, len(operations(holder))
