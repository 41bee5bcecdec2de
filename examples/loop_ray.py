"""A `TorchTrainer` of Ray Train whose workers are the ranks of a `Pipeline`.

python examples/loop_ray.py storage
"""

import sys
import tempfile
from pathlib import Path

import ray
import torch
from ray import train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn

import penstock
from penstock.plan.plan import Plan, Stage


def train_loop(config):
    """The program of each worker; Ray has made the process group, which the pipeline uses."""
    torch.manual_seed(0)
    points = torch.randn(320, 16)
    classes = (points[:, :8].sum(1) > points[:, 8:].sum(1)).long()
    data = list(zip(points.split(32), classes.split(32), strict=True))
    layers = nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    # By hand, to keep the example short: `penstock plan` writes a plan, `read_plan` reads it.
    stages = (Stage(range(2), (0,), (8,)), Stage(range(2, 4), (1,), (8,)))
    plan = Plan(stages, micro_batches=4, micro_batch_size=8, schedule="1f1b")
    with penstock.Pipeline(
        nn.Sequential(*layers),
        data[0],
        plan=plan,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    ) as pipe:
        if (saved := train.get_checkpoint()) is not None:
            with saved.as_directory() as folder:
                pipe.load(folder)
        # Ranks write into one folder that all of them reach; Ray keeps a copy of it.
        place = Path(config["checkpoints"])
        while pipe.steps < config["steps"]:
            loss = pipe.step(data[pipe.steps % len(data)]).loss
            if pipe.steps % 5:
                train.report({"loss": loss, "step": pipe.steps})
                continue
            pipe.save(place, keep=1)
            own = Checkpoint.from_directory(place) if pipe.rank == 0 else None
            train.report({"loss": loss, "step": pipe.steps}, checkpoint=own)
            if pipe.steps == config.get("fails_at") and saved is None:
                raise RuntimeError("as a lost machine")


def fit(storage, **config):
    """Train; after a failure Ray starts the workers again, from the latest checkpoint."""
    with tempfile.TemporaryDirectory(dir=storage) as checkpoints:
        return TorchTrainer(
            train_loop,
            train_loop_config=config | {"checkpoints": checkpoints},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                storage_path=str(storage), failure_config=FailureConfig(max_failures=1)
            ),
        ).fit()


if __name__ == "__main__":
    storage = Path(sys.argv[1]).resolve()
    storage.mkdir(parents=True, exist_ok=True)
    ray.init(num_cpus=2, include_dashboard=False)
    result = fit(storage, steps=20, fails_at=10)
    print(f"step {result.metrics['step']} loss {result.metrics['loss']:.6f}")
