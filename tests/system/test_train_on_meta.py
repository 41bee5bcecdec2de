"""`penstock train` with a model that is built on the meta device: no worker has it whole."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import losses, train, weights_in
from training_jobs import build, job_file

from penstock.errors import BadInput
from penstock.profile.json_file import read_profile
from penstock.train.job_file import find_job
from penstock.train.train import TrainRequest, TrainResult, train_job, verify_job

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """First weights of the small model."""
    torch.manual_seed(7)
    (tmp_path / "weights").mkdir()
    save_file(build().state_dict(), tmp_path / "weights" / "model.safetensors")
    return tmp_path / "weights"


def from_weights(folder: Path, model: str, out: str, **more: Any) -> TrainResult:
    """Train the small job from its weights, and save them to ``<out>-weights``."""
    saved = f'"{out}-weights"'
    return train(folder, out=out, model=model, weights='"weights"', save_weights=saved, **more)


def test_a_model_on_meta_trains_like_one_with_values(tmp_path: Path, weights: Path) -> None:
    made = {"meta": "build_on_meta", "real": "build"}
    runs = [from_weights(tmp_path, model, out) for out, model in made.items()]
    meta, real = (losses(run.run_directory) for run in runs)
    assert len(meta) == 6
    assert meta == real
    assert len(list((tmp_path / "meta-weights").glob("*.safetensors"))) == 2
    saved = weights_in(tmp_path / "meta-weights")
    first = load_file(weights / "model.safetensors")
    assert saved.keys() == first.keys()
    assert not any(torch.equal(saved[name], first[name]) for name in first)
    assert runs[0].weights == tmp_path / "meta-weights"
    profiles = [read_profile(run.run_directory / "profile.json") for run in runs]
    for one, other in zip(profiles[0].layers, profiles[1].layers, strict=True):
        assert (one.parameter_bytes, one.saved_bytes) == (other.parameter_bytes, other.saved_bytes)
        assert one.forward_s.at(4) > 0


def test_a_run_is_resumed_without_its_first_weights(tmp_path: Path, weights: Path) -> None:
    whole, resumed = (from_weights(tmp_path, "build_on_meta", out) for out in ("whole", "resumed"))
    job = replace(find_job(tmp_path / "small.toml"), steps=8, save_weights=None)
    options = TrainRequest(workers=2, resume=True, shown=False)
    train_job(job, replace(options, out=whole.run_directory))
    shutil.rmtree(weights)
    train_job(job, replace(options, out=resumed.run_directory))
    found = losses(whole.run_directory)
    assert len(found) == 8
    assert found == losses(resumed.run_directory)


def test_a_model_on_meta_is_verified(tmp_path: Path, weights: Path) -> None:
    job = find_job(job_file(tmp_path, model="build_on_meta", weights='"weights"'))
    found = verify_job(job, workers=2)
    assert found.equal
    assert found.compared == 6


@pytest.mark.slow
def test_a_job_in_half_precision_on_meta_takes_every_command(
    tmp_path: Path, penstock: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = job_file(tmp_path, data="half_regression", model="half_build_on_meta", steps=2)
    workers = ("--workers", "2")
    for command in (
        ("profile", job, "--estimate", "H100-80GB", "-o", "profile.json"),
        ("plan", "profile.json", "--cluster", "dapple-b", "--batch", "16", "-o", "plan.json"),
        ("simulate", "plan.json"),
        ("verify", job, *workers),
        ("train", job, *workers, "-o", "run", "--save-weights", "weights"),
    ):
        answer = penstock(*command, "--json")
        assert answer.code == 0, answer.errors
    assert json.loads(answer.output)["weights"] == "weights"
    saved = weights_in(tmp_path / "weights")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}


def test_weights_of_another_model_are_refused_before_anything_is_measured(
    tmp_path: Path, weights: Path
) -> None:
    save_file({"0.weight": torch.ones(2, 2)}, weights / "model.safetensors")
    missing = r"lacks '0.bias', '2.weight', '2.bias' and 2 more, which Sequential has"
    with pytest.raises(BadInput, match=missing):
        from_weights(tmp_path, "build_on_meta", "run")
    assert not (tmp_path / "run" / "profile.json").exists()


def test_weights_are_not_written_over_others(tmp_path: Path, weights: Path) -> None:
    (tmp_path / "run-weights").symlink_to(weights)
    with pytest.raises(BadInput, match="run-weights' holds weights already"):
        from_weights(tmp_path, "build_on_meta", "run")
    assert not (tmp_path / "run").exists()
