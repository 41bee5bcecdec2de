"""Part 2.1: each rank of a plan for eight GPUs alone, with its real stages in their real order.

Its messages are zeros and what it sends is dropped; groups sum nothing. So memory and seconds of
every action are those of the rank in the whole pipeline, and one GPU is enough to see them.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from rows import Row, Setting, told, under
from torch import nn
from torch.optim import AdamW

from penstock.capture.capture import capture_model
from penstock.cluster.cluster import Cluster, Device, Host
from penstock.device import begin_peak, own_device, peak_bytes
from penstock.measure.roofline import estimate_profile
from penstock.plan.ordering import order_of
from penstock.plan.plan import Plan, Stage
from penstock.runtime import engine, pipeline
from penstock.runtime.gradients.buckets import GradientBucket
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.processes.world import World
from penstock.runtime.transport.messages import Message
from penstock.runtime.transport.process_groups import empty_buffer, unpacked
from penstock.runtime.transport.transport import Inlet
from penstock.schedule.action import Action
from penstock.simulate.simulation import simulate_plan

HARDWARE = "H100-80GB"
MEMORY_BAR = 0.05
RESERVE_SHARE = 0.1
"""Bytes that the allocator may hold beside what is planned."""
SECONDS_BAR = 0.25
STEPS = 2


@dataclass(frozen=True)
class Subject:
    """A model on the meta device, and batches of it, for a plan of as many GPUs as ``stages``."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    rows: int
    micro_batches: int
    stages: int = 8
    schedule: str = "1f1b"
    autocast: torch.dtype | None = torch.bfloat16


def words(rows: int, length: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """Tokens, the same every time."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, vocabulary, (rows, length), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def gpt2(blocks: int, width: int, heads: int) -> nn.Module:
    """GPT-2 without dropout."""
    import transformers

    quiet = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(n_layer=blocks, n_embd=width, n_head=heads, **quiet)
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    """The sizes of Llama 3.1 8B."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def resnet() -> nn.Module:
    """ResNet-50."""
    import transformers

    return transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000))


def pictures(rows: int) -> dict[str, torch.Tensor]:
    """Pictures and their classes."""
    return {"pixel_values": torch.randn(rows, 3, 224, 224), "labels": torch.arange(rows)}


SUBJECTS = {
    "GPT-2, small": Subject(lambda: gpt2(4, 64, 2), lambda n: words(n, 32, 1000), 2, 8, 4, "zb-h1"),
    "GPT-2 XL": Subject(lambda: gpt2(48, 1600, 25), lambda n: words(n, 1024, 50000), 2, 16),
    "ResNet-50": Subject(resnet, pictures, 32, 16, autocast=None),
    "Llama 8B": Subject(llama, lambda n: words(n, 2048, 128000), 1, 16),
}


class LonelyWorld(World):
    """Many ranks, of which only this one is here: the others say what it says."""

    def all_gather(self, value: Any, *types: type) -> list[Any]:
        """The value for every rank."""
        return [value] * self.size

    def new_group(self, ranks: Sequence[int], backend: str = "") -> dist.ProcessGroup | None:
        """A group that does nothing."""
        group = dist.new_group(list(ranks), backend="fake")
        return group if isinstance(group, dist.ProcessGroup) and len(ranks) > 1 else None


class ZerosTransport:
    """A transport that gives zeros and drops what is sent; see `Transport`."""

    def __init__(self, world: World) -> None:
        self.world = world

    def nothing(self, *_: object) -> None:
        """All that only others could notice."""

    begin = proceed = at = drain = abort = close = nothing

    def position(self) -> str:
        """Return nothing: no caller reads it."""
        return ""

    def outlet(self, message: Message) -> Callable[[Sequence[torch.Tensor]], None]:
        """Drops."""
        return self.nothing

    def inlet(self, message: Message) -> Inlet:
        """Zeros of the message's size."""

        def take() -> list[torch.Tensor]:
            return unpacked(message, empty_buffer(message, self.world.device).zero_())

        return Inlet(self.nothing, take)

    def announce(self, values: list[float], what: str) -> Callable[[], list[list[float]]]:
        """The others have this rank's numbers, and a loss of which something counts."""
        others = [*values]
        if len(others) > 1:
            others[1] = others[1] or 1.0
        rows = [[*others] for _ in range(self.world.size)]
        rows[self.world.rank] = values
        return lambda: rows

    def share_sums(self, buckets: Sequence[GradientBucket]) -> None:
        """Sums go by the groups, which do nothing."""


@contextmanager
def alone(rank: int, size: int, device: torch.device) -> Iterator[None]:
    """Make pipelines in the block rank ``rank`` of ``size``."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    devices = tuple(map(str, range(size)))
    everyone = dist.group.WORLD

    def joined(*_: object) -> World:
        assert everyone is not None
        own = own_device(device)
        return LonelyWorld(rank, size, own, ("here",) * size, devices, None, 60.0, [everyone])

    with ExitStack() as undo:
        undo.callback(lambda: dist.is_initialized() and dist.destroy_process_group())
        undo.enter_context(patch.object(pipeline, "join_world", joined))
        opened = patch.object(engine, "open_transport", lambda world, *_: ZerosTransport(world))
        undo.enter_context(opened)
        yield


def each_rank_alone(setting: Setting) -> Iterator[Row]:
    """Memory and seconds of each rank of each plan."""
    for name, subject in SUBJECTS.items():
        if setting.small != (name == "GPT-2, small"):
            continue
        plan, predicted = planned(subject)
        for rank in plan.devices:
            if setting.is_over:
                yield Row("2.1", f"{name}, from rank {rank} on", "no time left", "failed")
                break
            try:
                yield from rank_alone(name, rank, plan, predicted, setting)
            except Exception as error:
                text = f"{type(error).__name__}: {error}"[:300]
                yield Row("2.1", f"{name}, rank {rank}", text, "failed")


def rank_alone(
    name: str, rank: int, plan: Plan, predicted: dict[str, Any], setting: Setting
) -> Iterator[Row]:
    """The rows of a rank."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    free_before = torch.cuda.mem_get_info()[0]
    subject = SUBJECTS[name]
    batch = subject.batch(subject.rows * subject.micro_batches)
    with torch.device("meta"):
        model = subject.make().train()
    options: dict[str, Any] = {"verify": "off", "device": setting.device}
    options["optimizer"] = lambda parameters: AdamW(parameters, lr=1e-5, fused=True)
    few = {key: value[: subject.rows] for key, value in batch.items()}
    with alone(rank, len(plan.devices), setting.device):
        graph = capture_model(model, few)
        with Pipeline(graph, batch, plan=plan, autocast=subject.autocast, **options) as pipe:
            for _ in range(STEPS):
                pipe.step(batch)
            begin_peak(setting.device)
            pipe.step(batch)
            allocated = peak_bytes(setting.device)
            reserved = torch.cuda.max_memory_reserved()
            taken = free_before - torch.cuda.mem_get_info()[0]
            records = [r for r in pipe._engine.clock.records if r.kind in "FBIWR"]
    of = f"{name}, rank {rank} alone"
    ours = [Action(r.kind, r.stage, r.micro_batch) for r in records]  # type: ignore[arg-type]
    expected = list(order_of(plan).of(plan.device_of(rank)))
    moved = sum(a != b for a, b in zip(ours, expected, strict=False))
    yield under("2.1", f"{of}: actions out of order", moved + abs(len(ours) - len(expected)), 0)
    peak = predicted["peak_bytes"][rank]
    yield from memory_of(of, peak, allocated, reserved, taken, setting)
    yield from seconds_of(of, records, predicted["stage_s"], setting)


def memory_of(
    of: str, predicted: float, allocated: int, reserved: int, taken: int, setting: Setting
) -> Iterator[Row]:
    """Bytes of tensors and of torch's allocator against the prediction, and of the process."""
    numbers = {"predicted": predicted, "allocated": allocated, "reserved": reserved}
    numbers |= {"whole process": taken}
    error = abs(allocated / predicted - 1)
    row = under(
        "2.1", f"{of}: allocated over predicted bytes, off by", error, MEMORY_BAR, **numbers
    )
    yield setting.by_device(row)
    over = max(0.0, reserved / predicted - 1)
    row = under("2.1", f"{of}: reserved beyond predicted bytes", over, RESERVE_SHARE, **numbers)
    yield setting.by_device(row)
    yield told("2.1", f"{of}: the whole process", f"{taken / 1e9:.2f} GB", **numbers)


def seconds_of(
    of: str, records: Sequence[Any], stage_s: Sequence[Sequence[float]], setting: Setting
) -> Iterator[Row]:
    """A row for the forwards and one for the backwards of each stage, the halves together."""
    for stage in sorted({record.stage for record in records}):
        for kinds, name, predicted in zip(
            ("F", "BIW"), ("forward", "backward"), stage_s[stage], strict=True
        ):
            each = [
                [r.end_s - r.start_s for r in records if r.stage == stage and r.kind == kind]
                for kind in kinds
            ]
            measured = sum(median(found) for found in each if found)
            error = abs(predicted / measured - 1) if measured else float("inf")
            numbers = {"predicted_s": predicted, "measured_s": measured}
            what = f"{of}: {name} of stage {stage}, estimate off by"
            yield setting.by_device(under("2.1", what, error, SECONDS_BAR, **numbers))


def planned(subject: Subject) -> tuple[Plan, dict[str, Any]]:
    """An even plan, and what is predicted of every rank from the data sheet."""
    few = subject.batch(subject.rows)
    with torch.device("meta"):
        model = subject.make().train()
    graph = capture_model(model, few)
    sizes = tuple(sorted({max(1, subject.rows // 2), subject.rows, 2}))
    profile = estimate_profile(graph, few, HARDWARE, batch_sizes=sizes, autocast=subject.autocast)
    plan = even_in_seconds(profile, subject)
    gpus = tuple(Device(f"gpu{n}", 80e9) for n in range(subject.stages))
    cluster = Cluster("eight GPUs", (Host("host", gpus, 450e9),))
    seconds = [
        [profile.forward_s(s.layers, subject.rows), profile.backward_s(s.layers, subject.rows)]
        for s in plan.stages
    ]
    peaks = simulate_plan(plan, profile, cluster).peak_memory_bytes
    return plan, {"peak_bytes": peaks, "stage_s": seconds}


def even_in_seconds(profile: Any, subject: Subject) -> Plan:
    """Stages of as equal seconds as consecutive layers allow, one GPU each."""
    rows, layers = subject.rows, len(profile.layers)
    each = [
        profile.forward_s(range(n, n + 1), rows) + profile.backward_s(range(n, n + 1), rows)
        for n in range(layers)
    ]
    ends, passed = [0], 0.0
    for layer, seconds in enumerate(each):
        passed += seconds
        left = subject.stages - len(ends)
        full = passed >= sum(each) * len(ends) / subject.stages or layers - layer - 1 == left
        if left and full:
            ends.append(layer + 1)
    ends.append(layers)
    stages = tuple(Stage(range(lo, hi), (n,), (rows,)) for n, (lo, hi) in enumerate(pairwise(ends)))
    return Plan(stages, subject.micro_batches, rows, subject.schedule)
