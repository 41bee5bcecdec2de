"""Fixtures that several rooms share: a small problem, a run of it on disk, the command line."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from penstock import cli
from penstock.cluster.cluster import Cluster, Device, Host
from penstock.cluster.toml_file import write_cluster
from penstock.plan.json_file import write_plan
from penstock.plan.plan import Plan, Stage
from penstock.profile.json_file import write_profile
from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile
from penstock.simulate.simulation import simulate_plan
from penstock.timeline.json_file import write_timeline_json
from penstock.timeline.metrics import iteration_s

STEPS = 40

# No test compares seconds: a busy machine is no error.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

IN_WORKERS = (
    "transformers.models.gpt2.modeling_gpt2",
    "penstock.train.rank_program",
    "tensorboard.compat.proto.event_pb2",
    "lightning.pytorch",
)
"""What worker processes of tests need besides; the first and the last take seconds."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the server that workers are forked from import it, once for all of them."""
    server: Any = sys.modules.get("penstock.runtime.processes.fork_server")
    if server is not None:
        server.IMPORTED_ONCE = (*server.IMPORTED_ONCE, *IN_WORKERS)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Look for doctests in the package only: a test's helpers are imported by the test."""
    helper = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    return True if helper and collection_path.name != "conftest.py" else None


def layer(name: str, weight: float) -> LayerCost:
    """A layer that costs ``weight`` times 1 ms and 1 MB."""
    return LayerCost(
        name=name,
        forward_s=Affine(0.0001, 0.001 * weight),
        backward_input_s=Affine(0.0001, 0.001 * weight),
        backward_weight_s=Affine(0.0001, 0.001 * weight),
        parameter_bytes=int(1_000_000 * weight),
        saved_bytes=Affine(0.0, 400_000 * weight),
    )


@pytest.fixture(scope="session")
def small_profile() -> ModelProfile:
    """Eight layers, of which the first and the last are cheap."""
    layers = (
        layer("embedding", 0.3),
        *(layer(f"blocks.{i}", 1.0) for i in range(6)),
        layer("head <loss>", 0.6),
    )
    edges = tuple(
        Edge(i, i + 1, f"hidden.{i}", Affine(0.0, 50_000.0), Affine(0.0, 50_000.0))
        for i in range(len(layers) - 1)
    )
    return ModelProfile("small", layers, edges, batch_size=4, source="written for tests")


@pytest.fixture(scope="session")
def small_cluster() -> Cluster:
    """Four devices of one host."""
    host = Host("localhost", (Device("cpu", 60e6),) * 4, link_bytes_per_s=1e8, link_latency_s=1e-4)
    return Cluster("four", (host,))


@pytest.fixture(scope="session")
def small_plan() -> Plan:
    """Three stages, the middle one replicated and recomputing."""
    return Plan(
        stages=(
            Stage(range(0, 3), (0,), (2,)),
            Stage(range(3, 7), (1, 2), (1, 1), recompute=True),
            Stage(range(7, 8), (3,), (2,)),
        ),
        micro_batches=6,
        micro_batch_size=2,
        schedule="1f1b",
        planner="search",
    )


@pytest.fixture
def run_directory(
    tmp_path: Path, small_profile: ModelProfile, small_cluster: Cluster, small_plan: Plan
) -> Path:
    """A run as ``penstock train`` leaves it; "measured" is simulated on slower devices."""
    place = tmp_path / "run"
    place.mkdir()
    host = small_cluster.hosts[0]
    speeds = (0.9, 0.85, 0.95, 0.8)
    slower = replace(host, devices=tuple(replace(host.devices[0], speed=s) for s in speeds))
    predicted = simulate_plan(small_plan, small_profile, small_cluster)
    measured = simulate_plan(small_plan, small_profile, Cluster("slower", (slower,)))
    write_plan(small_plan, place / "plan.json")
    write_profile(small_profile, place / "profile.json")
    write_cluster(small_cluster, place / "cluster.toml")
    write_timeline_json(predicted.timeline, place / "predicted.json")
    write_timeline_json(replace(measured.timeline, title="measured"), place / "measured.json")
    rows: list[dict[str, float]] = []
    for step in range(1, STEPS + 1):
        rows.append({"step": step, "loss": 2 + 3 / step, "samples_per_s": 100.0 + step % 5})
        if step % 10 == 0:
            rows.append({"step": step, "evaluation_loss": 2.1 + 3 / step})
    (place / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    summary = {
        "job": "small & <tidy>",
        "workers": 4,
        "steps": STEPS,
        "loss": 2 + 3 / STEPS,
        "samples_per_s": 102.0,
        "predicted_s": predicted.iteration_s,
        "measured_s": iteration_s(measured.timeline),
        "measured_peak_memory_bytes": [
            1.05 * predicted.peak_memory_bytes[device] for device in small_plan.devices
        ],
        "circumstances": {
            "began": "2026-11-27 10:48 UTC",
            "command": "penstock train small --workers 4",
            "host": "host-7",
            "hosts": 2,
            "processor": "a <processor>",
            "cores": 4,
            "memory_bytes": 8e9,
            "load_before": 0.25,
            "load_during": 4.5,
            "versions": {"penstock": "1.0", "torch": "2.13.0"},
        },
    }
    (place / "summary.json").write_text(json.dumps(summary))
    return place


@pytest.fixture(scope="session", autouse=True)
def _no_plans_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Plans that tests find are kept for their session alone."""
    os.environ["PENSTOCK_CACHE"] = str(tmp_path_factory.mktemp("plans"))


@dataclass(frozen=True)
class Answer:
    """How a command ended."""

    code: int
    output: str
    errors: str

    @property
    def values(self) -> dict[str, object]:
        """The JSON object that is all of the standard output."""
        return json.loads(self.output)


@pytest.fixture
def penstock(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Answer]:
    """Run ``penstock`` with arguments in this process."""

    def run(*arguments: object) -> Answer:
        monkeypatch.setattr("sys.argv", ["penstock", *map(str, arguments)])
        capsys.readouterr()
        code = cli.run()
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return run
