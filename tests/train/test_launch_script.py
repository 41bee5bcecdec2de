"""What starts a job elsewhere is valid, and keeps the order of hosts."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.train.launch_script import Start, slurm_script, torchrun_script

TWO = Start("small", ("small.toml", "--out", "/runs/a"), "/runs/a", (("a", 4), ("b", 2)))
EQUAL = Start("Small_1", ("a b.toml",), "/runs/a", (("a", 4), ("b", 4)), on_gpus=True)


@pytest.mark.parametrize("script", [torchrun_script, slurm_script])
@pytest.mark.parametrize("start", [TWO, EQUAL])
def test_a_script_is_valid_shell(
    script: Callable[[Start], str], start: Start, tmp_path: Path
) -> None:
    (tmp_path / "start.sh").write_text(script(start))
    subprocess.run(["bash", "-n", str(tmp_path / "start.sh")], check=True)


def test_slurm_puts_the_ranks_on_the_nodes_in_the_plans_order(tmp_path: Path) -> None:
    """The script itself, with Slurm's commands as far as it needs them."""
    (tmp_path / "scontrol").write_text("#!/bin/sh\nprintf 'n7\\nn9\\n'\n")
    (tmp_path / "srun").write_text('#!/bin/sh\ncat "$SLURM_HOSTFILE"; echo "$@"\n')
    for command in ("scontrol", "srun"):
        (tmp_path / command).chmod(0o755)
    (tmp_path / "start.sh").write_text(slurm_script(TWO))
    slurm = {"SLURM_JOB_NODELIST": "n[7,9]", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "1"}
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", str(tmp_path / "start.sh")],
        env=slurm | path,
        capture_output=True,
        text=True,
        check=True,
    )
    *nodes, srun = done.stdout.splitlines()
    assert nodes == ["n7"] * 4 + ["n9"] * 2
    assert "--ntasks=6" in srun
    assert srun.endswith("penstock train small.toml --out /runs/a")
    assert not list(tmp_path.glob(".penstock-hosts-*"))
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho n7\n")
    short = subprocess.run(
        ["bash", str(tmp_path / "start.sh")], env=slurm | path, capture_output=True, text=True
    )
    assert (short.returncode, short.stderr) == (2, "the job got 1 node(s), and its plan is for 2\n")
