"""Jobs are estimated without values, without text and without the device."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.cluster.toml_file import find_cluster
from penstock.errors import BadInput
from penstock.profile.model_profile import ModelProfile
from penstock.train.job import Job
from penstock.train.job_file import find_job
from penstock.train.profile_job import (
    build_and_capture,
    captured_without_values,
    estimate_job,
    estimated_profile,
    estimates_for,
)
from penstock.train.samples import TextData

SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 300, "num_attention_heads": 4}
CONFIGURATIONS: dict[str, dict[str, object]] = {
    "LlamaForCausalLM": {
        **SIZES,
        **{"model_type": "llama", "intermediate_size": 64, "num_key_value_heads": 2},
        **{"tie_word_embeddings": True, "max_position_embeddings": 64},
    },
    "GPT2LMHeadModel": {
        **{"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 300},
        **{"n_positions": 64},
    },
    "MixtralForCausalLM": {
        **SIZES,
        **{"model_type": "mixtral", "intermediate_size": 64, "num_key_value_heads": 2},
        **{"num_local_experts": 4, "max_position_embeddings": 64},
    },
}
LLAMA_3_8B = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"},
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    **{"max_position_embeddings": 8192, "rope_theta": 500000.0, "rms_norm_eps": 1e-5},
    "tie_word_embeddings": False,
}
PARAMETERS_OF_LLAMA_3_8B = 8_030_261_248


def job_from(name: str, folder: Path, penstock: Callable[..., Any], **keys: object) -> Job:
    """The job that ``penstock init --from`` writes for a configuration."""
    config = {"architectures": [name], **CONFIGURATIONS[name], **keys}
    (folder / "config.json").write_text(json.dumps(config))
    answer = penstock("init", "--from", str(folder / "config.json"), "-o", str(folder / "job.toml"))
    assert answer.code == 0, answer.errors
    return find_job(folder / "job.toml", ["batch_size=4"])


def of_shape(job: Job) -> Job:
    """The job with text of zeros, from which a model with values is captured, too."""
    assert isinstance(job.data, TextData)
    return replace(job, data=replace(job.data, shape_only=True))


def figures(profile: ModelProfile) -> list[float]:
    """All that an estimate says of the layers for a batch, and of what they send."""
    whole, size = range(len(profile.layers)), profile.batch_size
    each = [
        (layer.forward_s.at(size), layer.backward_s.at(size), layer.saved_bytes.at(size))
        for layer in profile.layers
    ]
    sums = [profile.parameter_bytes(whole), profile.forward_s(whole, 1)]
    return [figure for layer in each for figure in layer] + sums


@pytest.mark.parametrize(
    ("name", "dtype", "autocast"),
    [
        *((name, "bfloat16", "off") for name in CONFIGURATIONS),
        # Without values, torch multiplies rows of experts in bfloat16 only.
        *((name, "float32", "off") for name in CONFIGURATIONS if name != "MixtralForCausalLM"),
        ("LlamaForCausalLM", "float32", "bfloat16"),
    ],
)
def test_an_estimate_without_values_is_that_of_a_model_with_values(
    name: str, dtype: str, autocast: Any, tmp_path: Path, penstock: Callable[..., Any]
) -> None:
    written = of_shape(job_from(name, tmp_path, penstock, dtype=dtype))
    job = replace(written, autocast=autocast)
    graph = captured_without_values(job, None)
    assert all(parameter.is_meta for parameter in graph.model.parameters())
    real = build_and_capture(job)
    assert {str(p.dtype) for p in real.model.parameters()} == {f"torch.{dtype}"}
    (found,) = estimate_job(job, ["RTX4090-24GB"])
    expected = estimated_profile(job, real, "RTX4090-24GB")
    assert figures(found) == pytest.approx(figures(expected), rel=1e-9)
    assert [edge.bytes for edge in found.edges] == [edge.bytes for edge in expected.edges]
    assert found.shared == expected.shared
    assert bool(found.shared) == (name != "MixtralForCausalLM")  # tied weights stay so
    assert f"parameters in {dtype}" in found.source


def test_bytes_follow_the_precision(tmp_path: Path, penstock: Callable[..., Any]) -> None:
    job_from("LlamaForCausalLM", tmp_path, penstock, torch_dtype="bfloat16")
    told: dict[str, float] = {}
    for precision in ("", "fp32", "bf16"):
        given = ("--precision", precision) if precision else ()
        command = ("profile", str(tmp_path / "job.toml"), "--estimate", "A100-80GB", "--json")
        answer = penstock(*command, *given)
        assert answer.code == 0, answer.errors
        told[precision] = json.loads(answer.output)["parameter_bytes"]
    assert told["fp32"] == 2 * told[""] == 2 * told["bf16"]
    refused = penstock("profile", str(tmp_path / "job.toml"), "--precision", "bf16")
    assert (refused.code, "--precision is for --estimate" in refused.errors) == (2, True)
    wrong = find_job(tmp_path / "job.toml", ["model_arguments.dtype=int8"])
    with pytest.raises(BadInput, match=r"dtype is 'int8'; use one of float32, bfloat16"):
        wrong.model()


def test_text_is_not_read_for_an_estimate_and_is_missed_in_a_training(
    tmp_path: Path, penstock: Callable[..., Any]
) -> None:
    job = job_from("GPT2LMHeadModel", tmp_path, penstock)
    assert estimate_job(job, ["cpu"])[0].tokens_per_sample == 64
    with pytest.raises(BadInput, match=r"to train, name a file or directory as text\.path"):
        job.example_batch()
    (tmp_path / "empty.txt").write_text("")
    held = find_job(tmp_path / "job.toml", ["text.path=empty.txt", "text.length=32"])
    assert estimate_job(held, ["cpu"])[0].tokens_per_sample == 32
    longer = find_job(tmp_path / "job.toml", ["text.length=65"])
    with pytest.raises(BadInput, match="windows of 65 tokens, and its model reads 64"):
        estimate_job(longer, ["cpu"])


class ByValue(nn.Module):
    """Its constructor reads a value of a tensor, which the meta device does not have."""

    def __init__(self) -> None:
        super().__init__()
        width = int(torch.linspace(2, 8, 3)[-1].item())
        self.inner = nn.Linear(4, width)
        self.outer = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x)).mean()


class Constant(nn.Module):
    """It has a tensor that is neither a parameter nor a buffer, and multiplies the batch by it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 1)
        self.scale = torch.full((4,), 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x * self.scale)).mean()


def rows(split: str, seed: int, start_step: int, batch_size: int) -> Any:
    while True:
        yield torch.ones(batch_size, 4)


@pytest.mark.parametrize("build", [ByValue, Constant])
def test_a_model_that_needs_values_is_built_with_them(
    build: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job("own", lambda: build(), rows, batch_size=4)
    found = estimate_job(job, ["cpu"])[0]
    assert found.parameter_bytes(range(len(found.layers))) == 4 * (4 * 8 + 8 + 8 + 1)
    if build is Constant:  # its size is known, and too large
        monkeypatch.setattr("penstock.train.profile_job.usable_memory_bytes", lambda: 10)
        with pytest.raises(Exception, match="meta"):
            estimate_job(job, ["cpu"])


def test_each_device_of_a_cluster_is_estimated(
    tmp_path: Path, penstock: Callable[..., Any]
) -> None:
    job = job_from("LlamaForCausalLM", tmp_path, penstock)
    names = ("a100-8", "rtx4090-4", "rtx4090-rtx4080")
    profiles, clusters = estimates_for(job, [find_cluster(name) for name in names])
    assert [each.device for each in profiles] == ["A100-80GB", "RTX4090-24GB", "RTX4090-24GB"]
    alone = estimate_job(job, ["RTX4090-24GB", "RTX4080-16GB"])
    quick, slow = (
        each.forward_s(range(len(each.layers)), 4) + each.backward_s(range(len(each.layers)), 4)
        for each in alone
    )
    assert [device.speed for device in clusters[2].devices] == [1.0, pytest.approx(quick / slow)]
    assert {device.speed for device in (*clusters[0].devices, *clusters[1].devices)} == {1.0}


# The kernel gives a new process the peak of the one that started it, except here.
COUNTED_COMMAND = """
import atexit, re, time
from pathlib import Path
from penstock.cli import main

@atexit.register
def count():
    peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
    Path("memory").write_text(f"{peak[1]} {time.process_time()}")

main()
"""


@pytest.mark.timeout(900)
def test_a_model_of_8_billion_is_planned_from_its_configuration_in_little_memory(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def run(*words: str) -> tuple[dict[str, Any], int, float]:
        """The command's answer, the most memory that it had (kB) and its CPU seconds."""
        program = [sys.executable, "-c", COUNTED_COMMAND, *words, "--json"]
        done = subprocess.run(program, cwd=tmp_path, env=environment, stdout=subprocess.PIPE)
        assert done.returncode == 0
        memory = (tmp_path / "memory").read_text()
        return json.loads(done.stdout), int(memory.split()[0]), float(memory.split()[1])

    run("init", "--from", "config.json")
    found, most_kb, cpu_s = run("profile", "job.toml", "--estimate", "A100-80GB", "-o", "p.json")
    assert 100_000 < most_kb < 2_000_000
    assert cpu_s < 60
    assert found["parameter_bytes"] == 2 * PARAMETERS_OF_LLAMA_3_8B
    plan, _, _ = run(
        "plan", "p.json", "--cluster", "a100-8", "--batch", "16", "--planner", "dapple"
    )
    assert plan["fits"]
    asked = ("--batch", "16", "--tokens", "1e9", "--planner", "dapple")
    chosen, most_kb, _ = run("choose", "job.toml", "--clusters", "a100-8,rtx4090-4", *asked)
    assert chosen["chosen"] == "a100-8"
    times = {each["cluster"]: each for each in chosen["clusters"]}
    assert times["rtx4090-4"]["times_of"] == "RTX4090-24GB"
    assert times["a100-8"]["times_of"] == "A100-80GB"
    # Four of the slower card: half as many, with half of the peak, and less of it.
    assert 4 < times["rtx4090-4"]["hours"] / times["a100-8"]["hours"] < 7
    assert 100_000 < most_kb < 2_000_000
