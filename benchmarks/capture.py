"""How long capture takes.

    python benchmarks/capture.py [--rounds 3] [--out results.json] [--only Llama]
    python benchmarks/capture.py --smallest

Models have their usual sizes, on the meta device. Seconds are CPU seconds of this process, on one
thread, after one capture of a small model that loads what capture needs. With ``--only`` the other
models' results stay as they are.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import strftime
from typing import Any

import torch
import transformers
from torch import nn

from penstock.capture.capture import capture_model

RESULTS = Path(__file__).parent / "capture" / "results.json"

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Subject:
    """A model and how many layers it has; samples of ``tokens`` words."""

    name: str
    layers: int
    tokens: int
    build: Callable[[], nn.Module]


def gpt2(layers: int = 12, width: int = 768) -> nn.Module:
    """GPT-2 of 124M parameters, if nothing else is said."""
    config = transformers.GPT2Config(n_layer=layers, n_embd=width, n_head=width // 64)
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    """BERT, base."""
    return transformers.BertForMaskedLM(transformers.BertConfig())


def t5() -> nn.Module:
    """T5, base."""
    config = transformers.T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12)
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config)


def llama(layers: int) -> nn.Module:
    """Layers as wide as those of Llama 3 70B."""
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=4096,
    )
    return transformers.LlamaForCausalLM(config)


SUBJECTS = (
    Subject("GPT-2", 12, 1024, gpt2),
    Subject("BERT", 12, 512, bert),
    Subject("T5", 24, 512, t5),
    *(Subject("Llama 3", count, 4096, partial(llama, count)) for count in (12, 32, 80)),
)
SMALL = Subject("small GPT-2", 3, 16, partial(gpt2, 3, 64))


def main() -> None:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smallest", action="store_true", help="one model, nothing is written")
    parser.add_argument("--only", default="", help="models whose names and layers start like this")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seconds(SMALL)
    if arguments.smallest:
        print(json.dumps(row(SMALL, 2)))
        return
    out: Path = arguments.out
    before: list[dict[str, Any]] = json.loads(out.read_text())["rows"] if out.exists() else []
    rows = {named(each["model"], each["layers"]): each for each in before}
    for subject in SUBJECTS:
        name = named(subject.name, subject.layers)
        if name.startswith(arguments.only):
            rows[name] = row(subject, arguments.rounds)
            print(json.dumps(rows[name]), flush=True)
    in_order = [rows[n] for s in SUBJECTS if (n := named(s.name, s.layers)) in rows]
    out.parent.mkdir(exist_ok=True)
    text = json.dumps({"machine": machine(), "rows": in_order}, indent=1)
    out.write_text(text + "\n", encoding="utf-8")
    print("\n".join(table(in_order)))


def named(model: str, layers: int) -> str:
    """``Llama 3 80``."""
    return f"{model} {layers}"


def row(subject: Subject, rounds: int) -> dict[str, Any]:
    """The seconds of every round, in the order in which they were measured."""
    return {
        "model": subject.name,
        "layers": subject.layers,
        "seconds": [seconds(subject) for _ in range(rounds)],
    }


def seconds(subject: Subject) -> float:
    """CPU seconds of one capture."""
    with torch.device("meta"):
        model = subject.build()
    words = torch.zeros(2, subject.tokens, dtype=torch.long)
    batch: Batch = {"input_ids": words, "labels": words}
    start_s = time.process_time()
    capture_model(model, batch, granularity="block")
    return time.process_time() - start_s


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The results as on the page: medians, with the least and the most in brackets."""
    lines = ["| model | layers | seconds |", "|---|--:|--:|"]
    for each in rows:
        lines.append(f"| {each['model']} | {each['layers']} | {spread(each['seconds'])} |")
    return lines


def spread(values: Sequence[float]) -> str:
    """The median, with the least and the most.

    >>> spread([1.0, 3.0, 2.0])
    '2.0 (1.0 to 3.0)'
    """
    return f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def machine() -> dict[str, Any]:
    """Where and when, and how busy it was at the end."""
    return {
        "date": strftime("%Y-%m-%d"),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_at_the_end": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def processor() -> str:
    """The processor's name, where the system tells it."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8").splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()
