"""The readers of files: for each the way it is called, and the file name that it expects."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__all__ = ["READERS", "Reader"]


@dataclass(frozen=True)
class Reader:
    """How a kind of file is read; ``mend`` makes a changed file pass the first check."""

    file: str
    read: Callable[[Path], object]
    mend: Callable[[bytes], bytes] | None = None


def cluster(path: Path) -> object:
    """A cluster's TOML."""
    from penstock.cluster.toml_file import read_cluster

    return read_cluster(path)


def job(path: Path) -> object:
    """A job's TOML; its modules are imported."""
    from penstock.jobs.job_file import read_job

    return read_job(path)


def profile(path: Path) -> object:
    """A profile's JSON."""
    from penstock.profile.find import read_any_profile

    return read_any_profile(path)


def pipedream(path: Path) -> object:
    """PipeDream's graph text."""
    from penstock.profile.find import read_any_profile

    return read_any_profile(path, 64)


def table(path: Path) -> object:
    """A model's table."""
    from penstock.profile.built_in import read_model_table

    return read_model_table(path)


def plan(path: Path) -> object:
    """A plan's JSON."""
    from penstock.plan.json_file import read_plan

    return read_plan(path)


def schedule(path: Path) -> object:
    """A schedule's text."""
    from penstock.document import read_text
    from penstock.schedule.schedule import parse_schedule

    return parse_schedule(read_text(path, "schedule"))


def timeline(path: Path) -> object:
    """A timeline's JSON."""
    from penstock.timeline.json_file import read_timeline

    return read_timeline(path)


def steps(path: Path) -> object:
    """The steps of a run, as the report and a resumed run read them."""
    from penstock.report.record import read_metrics, read_rows

    return list(read_rows(path, damaged=False)), read_metrics(path)


def summary(path: Path) -> object:
    """The summary of a run."""
    from penstock.document import read_document
    from penstock.report.record import RunSummary

    return read_document(RunSummary, path, "summary")


def header(path: Path) -> object:
    """The header of a file with tensors."""
    from penstock.runtime.weights.safetensors_file import read_header

    return read_header(path)


def state(path: Path) -> object:
    """The state of a checkpoint."""
    from penstock.errors import BadInput
    from penstock.runtime.checkpoints.checkpoint import damage_of, read_state
    from penstock.runtime.checkpoints.loader_state import loader_from_text

    if len(problem := damage_of(path.parent)) > 600:
        raise BadInput(problem)
    found = read_state(path.parent)
    loader: Any = SimpleNamespace(load_state_dict=dict)
    loader_from_text(loader, found.get("loader"), "step-4")
    return found


def index(path: Path) -> object:
    """The list of the files of a model's weights; the files are there."""
    from penstock.runtime.weights.pretrained import tensors_in

    for name, header in SHARDS.items():
        if not (path.parent / name).exists():
            size = b"%c\0\0\0\0\0\0\0" % len(header)
            (path.parent / name).write_bytes(size + header + bytes(24))
    return tensors_in(path.parent)


def config(path: Path) -> object:
    """The description of a model beside its weights."""
    from torch import nn

    from penstock.runtime.weights.pretrained import check_architecture

    model = nn.Identity()
    object.__setattr__(model, "config", SimpleNamespace(model_type="gpt2"))
    return check_architecture(path.parent, model)


def prediction(path: Path) -> object:
    """What a plan was made for."""
    from penstock.planning.plan_files import recorded_origin

    return recorded_origin(path.parent / "plan.json")


def message(path: Path) -> object:
    """A message from another rank."""
    from penstock.runtime.serialization import from_bytes

    return from_bytes(path.read_bytes(), "a message between ranks")


def layout(source: str, file: str) -> Reader:
    """Another framework's layout, made a plan of a model of six blocks."""

    def read(path: Path) -> object:
        from penstock.bridges.formats import read_layout
        from penstock.bridges.layout import AskedLayout, plan_of_layout
        from penstock.profile.model_profile import Affine, Edge, LayerCost, ModelProfile

        parts = (f"h.{block}.{part}" for block in range(6) for part in ("attn", "mlp"))
        names, cost = ("wte", *parts, "head", "loss"), Affine(0.001, 0.001)
        layers = tuple(LayerCost(name, cost, cost, cost, 1000) for name in names)
        edges = tuple(Edge(i, i + 1, f"t{i}", cost, cost) for i in range(len(names) - 1))
        profile = ModelProfile("model", layers, edges, batch_size=4)
        asked = AskedLayout(micro_batch=2, batch=16)
        return plan_of_layout(read_layout(source, path, profile, asked), asked)

    return Reader(file, read)


def actions(path: Path) -> object:
    """The actions of torch's runtime as CSV."""
    from penstock.bridges.torch_pipelining import read_csv

    return read_csv(path)


def with_checksum(data: bytes) -> bytes:
    """A state whose checksum is right, if it is JSON at all."""
    try:
        content = json.loads(data)
        content.pop("sha256", None)
        text = json.dumps(content, sort_keys=True).encode()
        return json.dumps({**content, "sha256": hashlib.sha256(text).hexdigest()}).encode()
    except (ValueError, AttributeError, TypeError, RecursionError):
        return data


SHARDS = {
    "model-00001-of-00002.safetensors": b'{"b": {"dtype": "F32", "shape": [2], "data_offsets": '
    b'[0, 8]}, "model.a": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}}',
    "model-00002-of-00002.safetensors": b'{"c": {"dtype": "F32", "shape": [6], "data_offsets": '
    b"[0, 24]}}",
}
"""The files of a model's weights: their headers; each holds 24 bytes of tensors."""

READERS = {
    "cluster": Reader("cluster.toml", cluster),
    "job": Reader("job.toml", job),
    "profile": Reader("profile.json", profile),
    "pipedream": Reader("graph.txt", pipedream),
    "table": Reader("model.toml", table),
    "plan": Reader("plan.json", plan),
    "schedule": Reader("schedule.txt", schedule),
    "timeline": Reader("timeline.json", timeline),
    "steps": Reader("metrics.jsonl", steps),
    "summary": Reader("summary.json", summary),
    "header": Reader("rank-00000.safetensors", header),
    "state": Reader("state.json", state, with_checksum),
    "index": Reader("model.safetensors.index.json", index),
    "config": Reader("config.json", config),
    "prediction": Reader("plan.predicted.json", prediction),
    "message": Reader("message.bin", message),
    "actions": Reader("layout.csv", actions),
    "torch-layout": layout("torch", "layout.json"),
    "megatron-layout": layout("megatron", "layout.txt"),
}
