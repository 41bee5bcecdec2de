"""What a stage's forward takes above the stage's own modules.

    python benchmarks/stage_forward.py [--rounds 200] [--out results.json]

A stage runs the user's forward, with the calls of other stages left out. Beside it its own modules
run alone, in plain PyTorch, on the inputs that they get in the whole model. Tensors are tiny, so
that hardly anything but calls is timed. Both run in turns on one thread; the least of all rounds
counts, since other work on the machine only ever adds time.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional

from penstock.capture.capture import capture_model
from penstock.capture.stage_program import StageProgram

RESULTS = Path(__file__).parent / "runtime" / "stage_forward.json"
STAGES = 4

Call = Callable[[], Any]


@dataclass(frozen=True)
class Subject:
    """A model with a batch; ``blocks`` are the paths of what is divided among the stages.

    ``tail`` are the paths of what follows them, before a cross entropy.
    """

    name: str
    model: nn.Module
    batch: Any
    blocks: Sequence[str]
    tail: Sequence[str] = ()
    loss: Callable[..., torch.Tensor] | None = None


def linear() -> Subject:
    """Eight linear layers."""
    parts = [nn.Linear(16, 16) for _ in range(8)]
    batch = torch.randn(2, 16), torch.tensor([1, 2])
    blocks = [str(i) for i in range(8)]
    net = nn.Sequential(*parts)
    return Subject("8 x Linear(16)", net, batch, blocks, loss=functional.cross_entropy)


def words() -> dict[str, torch.Tensor]:
    """Two sequences of sixteen words, which are their own targets."""
    ids = torch.arange(32).view(2, 16)
    return {"input_ids": ids, "labels": ids}


def gpt2() -> Subject:
    """GPT-2 of twelve blocks, 32 wide, without dropout."""
    rest = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(
        n_layer=12, n_embd=32, n_head=2, vocab_size=100, n_positions=64, use_cache=False, **rest
    )
    model = transformers.GPT2LMHeadModel(config)
    blocks = [f"transformer.h.{i}" for i in range(12)]
    return Subject("GPT-2", model, words(), blocks, ("transformer.ln_f", "lm_head"))


def llama() -> Subject:
    """A Llama of twelve blocks, 32 wide."""
    config = transformers.LlamaConfig(
        num_hidden_layers=12,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=100,
        max_position_embeddings=64,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    blocks = [f"model.layers.{i}" for i in range(12)]
    return Subject("Llama", model, words(), blocks, ("model.norm", "lm_head"))


def main() -> None:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [row for make in (linear, gpt2, llama) for row in rows_of(make(), arguments.rounds)]
    arguments.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(rows)))


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The results as on the page, in whole microseconds."""
    lines = [
        "| model | stage | the stage (us) | its modules alone (us) | above (us) |",
        "|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        above = row["stage_us"] - row["plain_us"]
        figures = f"{row['stage_us']:.0f} | {row['plain_us']:.0f} | {above:.0f}"
        lines.append(f"| {row['model']} | {row['stage']} | {figures} |")
    return lines


def rows_of(subject: Subject, rounds: int) -> list[dict[str, Any]]:
    """The microseconds of each stage and of its modules alone."""
    subject.model.train()
    graph = capture_model(subject.model, subject.batch, loss=subject.loss)
    each = len(subject.blocks) // STAGES
    starts = [subject.blocks[i] for i in range(each, len(subject.blocks), each)]
    firsts = [next(i for i, n in enumerate(graph.layer_names) if inside(n, s)) for s in starts]
    cuts = [0, *firsts, len(graph.layer_names)]
    programs = [graph.stage(range(lo, hi)) for lo, hi in pairwise(cuts)]
    for program in programs:
        stage: Any = program.module
        stage.stage.hold(alone=False)  # as after the first step, when others' parameters are gone
    leaves = graph.batch_leaves(subject.batch)
    return [
        {"model": subject.name, "stage": number, **least_us(stage, plain, rounds)}
        for number, (stage, plain) in enumerate(
            zip(stage_calls(programs, leaves), plain_calls(subject, each), strict=True)
        )
    ]


def inside(name: str, path: str) -> bool:
    """Whether a layer is a module or within it."""
    return f"{name}.".startswith(f"{path}.")


def stage_calls(programs: Sequence[StageProgram], leaves: Sequence[torch.Tensor]) -> list[Call]:
    """A forward of every stage, with what the stages before it send."""
    between: dict[str, torch.Tensor] = {}
    calls: list[Call] = []
    for program in programs:
        own = [leaves[i] for i in program.batch_inputs]
        received = [
            between[s.name].detach().requires_grad_(s.requires_grad) for s in program.received
        ]
        stage: Any = program.module
        calls.append(partial(stage.run, own, received))  # as the runtime does
        for spec, tensor in zip(program.sent, calls[-1](), strict=False):
            between[spec.name] = tensor
    return calls


def plain_calls(subject: Subject, each: int) -> list[Call]:
    """The modules of every stage alone, each on its own input of a run of the whole model.

    The last stage has what follows the blocks, and a cross entropy of as many classes.
    """
    paths = [*subject.blocks, *subject.tail]
    given: dict[str, Call] = {}

    def note(path: str, module: nn.Module, args: Any, named: Any) -> None:
        detached = [detach(value) for value in args]
        given[path] = partial(module, *detached, **named)

    handles = [
        subject.model.get_submodule(path).register_forward_pre_hook(
            partial(note, path), with_kwargs=True
        )
        for path in paths
    ]
    if isinstance(subject.batch, dict):
        subject.model(**subject.batch)
    else:
        subject.model(subject.batch[0])
    for handle in handles:
        handle.remove()
    runs = [given[path] for path in subject.blocks]
    stages = [runs[i : i + each] for i in range(0, len(runs), each)]
    scores = detach(given[paths[-1]]()).flatten(0, -2)
    loss = partial(functional.cross_entropy, scores, torch.zeros(len(scores), dtype=torch.long))
    stages[-1] += [*(given[path] for path in subject.tail), loss]
    return [partial(all_of, calls) for calls in stages]


def detach(value: Any) -> Any:
    """A tensor as a stage receives it: without history, with a gradient if it is of numbers."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.is_floating_point())


def all_of(calls: Sequence[Call]) -> None:
    """Make every call."""
    for call in calls:
        call()


def least_us(stage: Call, plain: Call, rounds: int) -> dict[str, float]:
    """The least microseconds of both over rounds in turns."""
    found: dict[str, list[float]] = {"stage_us": [], "plain_us": []}
    for _ in range(rounds):
        for name, call in (("stage_us", stage), ("plain_us", plain)):
            start_s = time.perf_counter()
            call()
            found[name].append((time.perf_counter() - start_s) * 1e6)
    return {name: round(min(values), 1) for name, values in found.items()}


if __name__ == "__main__":
    main()
