"""``penstock doctor`` says what is here, and the remedy of what is missing."""

import json
import os
import shutil
import socket
from collections import namedtuple
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from commands.refusals import Penstock

from penstock.commands import doctor_command
from penstock.commands.doctor_command import Finding


def by_name(found: Iterator[Finding]) -> dict[str, Finding]:
    return {one.what: one for one in found}


def test_it_tells_what_others_say_of_this_machine(penstock: Penstock, tmp_path: Path) -> None:
    out = tmp_path / "findings.json"
    answer = penstock("doctor", "--json", "-o", str(out))
    assert answer.code == 0, answer.errors
    values = json.loads(answer.output)
    assert json.loads(out.read_text()) == values
    found = {one["what"]: one["found"] for one in values["findings"]}
    assert found["torch"] == torch.__version__ == version("torch")
    assert found["cores"].startswith(f"{len(os.sched_getaffinity(0))}, load ")
    assert str(Path.cwd()) in found["disk"]
    assert "GPUs" in found or "GPU 0" in found
    assert penstock("doctor").output.count("\n") > len(found)


def test_a_missing_package_is_named_with_what_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def version_of(package: str) -> str:
        if package in ("torch", "transformers"):
            raise PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(doctor_command, "version", version_of)
    found = by_name(doctor_command.of_packages())
    assert found["torch"].remedy == "training needs it: pip install 'penstock[train]'"
    assert found["transformers"] == Finding(
        "transformers", "not installed; for models of Hugging Face"
    )
    assert not found["safetensors"].remedy
    assert list(doctor_command.of_devices()) == []


def test_what_is_in_the_way_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(64 << 20, 0, 64 << 20))
    monkeypatch.setattr(os, "getloadavg", lambda: (64.0, 64.0, 64.0))
    monkeypatch.setattr(os, "access", lambda place, mode: False)
    found = by_name(doctor_command.of_system())
    assert "--shm-size" in found["/dev/shm"].remedy
    assert "busy" in found["cores"].remedy
    assert "-o" in found["disk"].remedy

    def no_address(name: str) -> str:
        raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "gethostbyname", no_address)
    assert "/etc/hosts" in by_name(doctor_command.of_network())["host name"].remedy
