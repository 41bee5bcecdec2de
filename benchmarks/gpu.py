"""One GPU: predictions of seconds and memory against a run, and the roofline against measurements.

    python benchmarks/gpu.py [--out FILE] [--only NAME ...]

Each model is captured, measured layer by layer, and trained on one device as two stages. Its row
says how far the prediction is from the run: seconds of a step (the median of nine) and the peak of
allocated memory; and how far the estimate from the data sheet is from what was measured, for the
median layer, the worst of those that take a twentieth of the whole, and all layers together.
On another device than an H100 the estimate is not judged.
"""

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.optim import AdamW

from penstock.capture.capture import capture_model
from penstock.capture.layer_graph import LayerGraph
from penstock.cluster.cluster import Cluster, Device, Host
from penstock.measure.layer_times import measure_profile
from penstock.measure.roofline import estimate_profile
from penstock.plan.plan import Plan, Stage
from penstock.profile.model_profile import ModelProfile
from penstock.runtime.pipeline import Pipeline
from penstock.simulate.simulation import simulate_plan

__all__ = ["main"]

OUT = Path(__file__).parent / "gpu" / "results.json"
MICRO_BATCHES, STEPS = 4, 9
IS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if IS_GPU else torch.device("cpu")


@dataclass(frozen=True)
class Subject:
    """A model with ``rows`` samples of a micro-batch; ``make(True)`` is a small one of its kind."""

    make: Callable[[bool], tuple[torch.nn.Module, Callable[[int], Any]]]
    rows: int
    autocast: torch.dtype | None = None


def text(make: Callable[[bool], Any], words: int) -> Any:
    """A language model and batches of ``words`` tokens."""

    def made(small: bool) -> tuple[torch.nn.Module, Callable[[int], Any]]:
        model, length = make(small), 32 if small else words

        def batch(rows: int) -> Any:
            tokens = torch.randint(2, 1000, (rows, length), device=DEVICE)
            return {"input_ids": tokens, "labels": tokens.clone()}

        return model, batch

    return made


def gpt2(small: bool) -> torch.nn.Module:
    """The widths of GPT-2 large, twelve blocks."""
    import transformers

    width, blocks, heads = (64, 2, 2) if small else (1280, 12, 20)
    quiet = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=blocks, n_embd=width, n_head=heads, **quiet)
    )


def llama(small: bool) -> torch.nn.Module:
    """The widths of Llama 3.2 1B, eight blocks."""
    import transformers

    width, blocks, heads = (64, 2, 2) if small else (2048, 8, 32)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=blocks,
            num_attention_heads=heads,
            num_key_value_heads=heads // 4 or 1,
            vocab_size=32000,
        )
    )


def bert(small: bool) -> torch.nn.Module:
    """The widths of BERT large, twelve blocks."""
    import transformers

    width, blocks, heads = (64, 2, 2) if small else (1024, 12, 16)
    quiet = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=blocks,
            num_attention_heads=heads,
            **quiet,
        )
    )


def resnet(small: bool) -> tuple[torch.nn.Module, Callable[[int], Any]]:
    """ResNet-50."""
    import transformers

    side = 64 if small else 224
    sizes: dict[str, Any] = {"hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1]}
    model = transformers.ResNetForImageClassification(
        transformers.ResNetConfig(num_labels=1000, **(sizes if small else {}))
    )

    def batch(rows: int) -> Any:
        pictures = torch.randn(rows, 3, side, side, device=DEVICE)
        return {
            "pixel_values": pictures,
            "labels": torch.randint(1000, (rows,), device=DEVICE),
        }

    return model, batch


SUBJECTS = {
    "GPT-2, float32": Subject(text(gpt2, 1024), 2),
    "GPT-2, bfloat16": Subject(text(gpt2, 1024), 4, torch.bfloat16),
    "Llama, bfloat16": Subject(text(llama, 2048), 2, torch.bfloat16),
    "BERT, bfloat16": Subject(text(bert, 512), 16, torch.bfloat16),
    "ResNet-50, float32": Subject(resnet, 32),
    "GPT-2 of short rows, bfloat16": Subject(text(gpt2, 128), 1, torch.bfloat16),
}


def judge(subject: Subject) -> dict[str, Any]:
    """The row of a model."""
    gc.collect()  # what the model before has left on the device
    torch.manual_seed(0)
    model, make_batch = subject.make(not IS_GPU)
    batch = make_batch(subject.rows * MICRO_BATCHES)
    graph = capture_model(model.train().to(DEVICE), batch)
    few, sizes = make_batch(subject.rows), (max(1, subject.rows // 2), subject.rows)
    start_s = perf_counter()
    precision: dict[str, Any] = {"autocast": subject.autocast}
    estimated = estimate_profile(graph, few, "H100-80GB", batch_sizes=sizes, **precision)
    step_s = {"step_s_per_byte": estimated.step_s_per_byte}
    measured = measure_profile(graph, few, batch_sizes=sizes, device=DEVICE, **precision, **step_s)
    row = {"profile_s": perf_counter() - start_s}
    row |= of_run(graph, batch, measured, subject)
    return row | of_estimate(estimated, measured, subject)


def of_run(
    graph: LayerGraph, batch: Any, profile: ModelProfile, subject: Subject
) -> dict[str, float]:
    """Predicted and measured seconds and bytes of a step."""
    layers = len(graph.layer_names)
    stages = tuple(
        Stage(range(layers * n // 2, layers * (n + 1) // 2), (0,), (subject.rows,))
        for n in range(2)
    )
    plan = Plan(stages, MICRO_BATCHES, subject.rows, "interleaved")
    cluster = Cluster("here", (Host("here", (Device("gpu", 1e12),), inf),))
    prediction = simulate_plan(plan, profile, cluster)
    options: dict[str, Any] = {"autocast": subject.autocast, "device": DEVICE}
    optimizer = lambda parameters: AdamW(parameters, lr=1e-5, fused=True)  # noqa: E731
    spans: list[float] = []
    with Pipeline(graph, plan, batch, optimizer=optimizer, verify="off", **options) as pipe:
        for _ in range(3):
            pipe.step(batch)
        for _ in range(STEPS):
            wait()
            start_s = perf_counter()
            pipe.step(batch)
            wait()
            spans.append(perf_counter() - start_s)
        with pipe.measuring_memory() as memory:
            pipe.step(batch)
        pipe.close(gather=True)
    return {
        "step_s": statistics.median(spans),
        "predicted_s": prediction.iteration_s,
        "peak_bytes": memory.peak_bytes,
        "predicted_bytes": prediction.peak_memory_bytes[0],
    }


def of_estimate(
    estimated: ModelProfile, measured: ModelProfile, subject: Subject
) -> dict[str, float]:
    """Estimated over measured seconds of layers, forward and backward together."""

    def seconds(profile: ModelProfile) -> list[float]:
        return [
            layer.forward_s.at(subject.rows) + layer.backward_s.at(subject.rows)
            for layer in profile.layers
        ]

    own, other = seconds(measured), seconds(estimated)
    ratios = [b / a for a, b in zip(own, other, strict=True) if a > 0.05 * sum(own)]
    return {
        "layers_s": sum(own),
        "estimate_all": sum(other) / sum(own),
        "estimate_median": statistics.median(ratios) if ratios else inf,
        "estimate_worst": max(ratios, key=lambda ratio: abs(ratio - 1)) if ratios else inf,
    }


def wait() -> None:
    """Until the device has done what it was given."""
    if IS_GPU:
        torch.cuda.synchronize()


def main() -> int:
    """Judge what is asked for, row by row; write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    rows: dict[str, Any] = {}
    for name, subject in SUBJECTS.items():
        if arguments.only and name not in arguments.only:
            continue
        try:
            rows[name] = judge(subject)
        except Exception as error:  # one model's failure does not end the others
            rows[name] = {"failure": f"{type(error).__name__}: {error}"[:400]}
        print(name, {k: v if isinstance(v, str) else round(v, 4) for k, v in rows[name].items()})
        device = torch.cuda.get_device_name() if IS_GPU else "cpu"
        found = {"device": device, "torch": torch.__version__, "rows": rows}
        arguments.out.parent.mkdir(exist_ok=True)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    return any("failure" in row for row in rows.values())


if __name__ == "__main__":
    sys.exit(main())
