"""`penstock launch`: what it prints is what it writes, and where the ranks run is said."""

import json
from pathlib import Path

import pytest
from commands.refusals import Penstock

from penstock.cluster.cluster import Cluster, Device, Host
from penstock.cluster.toml_file import write_cluster
from penstock.train import SEVERAL_GPUS

FORMS = ("--torchrun", "--slurm")


def on(kind: str, folder: Path, devices: int = 2) -> str:
    """The file of a cluster of one host with devices of a kind."""
    place = folder / f"{kind}.toml"
    write_cluster(Cluster(kind, (Host("a", (Device(kind, 8e9),) * devices, 1e9),)), place)
    return str(place)


@pytest.mark.parametrize("shown", [False, True], ids=["pipe", "terminal"])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_printed_is_what_is_written(
    penstock: Penstock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    shown: bool,
) -> None:
    """A line that is broken runs something else."""
    run = f"/shared/{'a' * 120}/[b]/{'c' * 170}"
    asked = ["launch", "job.toml", form, "--cluster", on("cpu", tmp_path), "--run", run]
    assert penstock(*asked, "-o", tmp_path / "written").code == 0
    monkeypatch.setenv("COLUMNS", "80")
    if shown:
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    printed = penstock(*asked).output
    assert printed == (tmp_path / "written").read_text()
    assert json.loads(penstock(*asked, "--json").output) == {"script": printed}


def test_the_clusters_devices_say_where_ranks_run(penstock: Penstock, tmp_path: Path) -> None:
    asked = ["launch", "job.toml", "--slurm", "--cluster"]
    gpus = penstock(*asked, on("A100-80GB", tmp_path))
    assert "--device cuda" in gpus.output and "#SBATCH --gpus-per-node=2" in gpus.output
    assert gpus.errors == f"{SEVERAL_GPUS}\n"
    assert "cuda" not in penstock(*asked, on("cpu", tmp_path)).output
    assert penstock(*asked, on("A100-80GB", tmp_path, devices=1)).errors == ""
    other = penstock(*asked, on("A100-80GB", tmp_path), "--device", "cpu")
    assert "cuda" not in other.output
    assert other.errors == "the devices of cluster 'A100-80GB' are A100-80GB, not cpu\n"
