"""Parts 2.2 and 2.3: the estimate from the data sheet and the prediction, against what is measured.

Each model is captured, measured layer by layer, and trained on one device as two stages. Its rows
say how far the prediction is from the run: seconds of a step (the median of nine) and the peak of
allocated memory; and how far the estimate is from what was measured, for the median layer, the
worst of those that take a twentieth of the whole, and all layers together. On another device than
an H100 the estimate is not judged.
"""

import gc
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter
from typing import Any

import torch
from rows import Row, Setting, told, under
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

MICRO_BATCHES, STEPS = 4, 9
PREDICTION_BAR, MEMORY_BAR, MEDIAN_BAR, WORST_BAR = 0.05, 0.10, 0.10, 0.25
DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True)
class Subject:
    """A model with ``rows`` samples of a micro-batch; ``make(True)`` is a small one of its kind.

    ``waits_for_python``: its kernels are so short that a data sheet says nothing of them.
    """

    make: Callable[[bool], tuple[torch.nn.Module, Callable[[int], Any]]]
    rows: int
    autocast: torch.dtype | None = None
    waits_for_python: bool = False


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
    "GPT-2 of short rows, bfloat16": Subject(text(gpt2, 128), 1, torch.bfloat16, True),
}


def judge(subject: Subject, *, small: bool) -> dict[str, Any]:
    """The findings of a model."""
    gc.collect()  # what the model before has left on the device
    torch.manual_seed(0)
    model, make_batch = subject.make(small)
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
    options: dict[str, Any] = {"autocast": subject.autocast, "device": DEVICE}
    optimizer = lambda parameters: AdamW(parameters, lr=1e-5, fused=True)  # noqa: E731
    spans: list[float] = []
    with Pipeline(graph, batch, plan=plan, optimizer=optimizer, verify="off", **options) as pipe:
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
        "peak_bytes": memory.peak_bytes,
        **predicted(plan, profile),
    }


def predicted(plan: Plan, profile: ModelProfile) -> dict[str, float]:
    """Seconds and bytes of a step."""
    cluster = Cluster("here", (Host("here", (Device("gpu", 1e12),), inf),))
    found = simulate_plan(plan, profile, cluster)
    bytes_ = found.peak_memory_bytes[0]
    return {"predicted_s": found.iteration_s, "predicted_bytes": bytes_}


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
    torch.cuda.synchronize()


def estimates_and_predictions(setting: Setting) -> Iterator[Row]:
    """The rows of every model."""
    global STEPS
    if setting.small:
        STEPS = 2
    for name, subject in SUBJECTS.items():
        if setting.small and name != "GPT-2, float32":
            continue
        if setting.is_over:
            yield Row("2.2", name, "no time left", "failed")
            continue
        try:
            found = judge(subject, small=setting.small)
        except Exception as error:  # one model's failure does not end the others
            yield Row("2.2", name, f"{type(error).__name__}: {error}"[:400], "failed")
            continue
        yield from rows_of(name, subject, found, setting)


def rows_of(name: str, subject: Subject, found: dict[str, Any], setting: Setting) -> Iterator[Row]:
    """The findings of a model, against the bars."""
    ratios = ("estimate_median", MEDIAN_BAR), ("estimate_worst", WORST_BAR)
    for key, bar in ratios:
        words = key.replace("_", " of the ") + " layer"
        row = under("2.2", f"{name}: {words}, off by", abs(found[key] - 1), bar, **found)
        judged = "H100" in torch.cuda.get_device_name() and not subject.waits_for_python
        yield setting.by_device(row if judged else replace(row, outcome="not judged"))
    yield told(
        "2.2", f"{name}: all layers, estimated over measured", f"{found['estimate_all']:.2f}"
    )
    error = abs(found["predicted_s"] / found["step_s"] - 1)
    row = under("2.3", f"{name}: predicted seconds, off by", error, PREDICTION_BAR, **found)
    yield setting.by_device(row)
    error = abs(found["predicted_bytes"] / found["peak_bytes"] - 1)
    what = f"{name}: predicted bytes, off by"
    yield setting.by_device(under("2.3", what, error, MEMORY_BAR, **found))
