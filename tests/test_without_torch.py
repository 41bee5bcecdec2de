"""``pip install penstock`` has no torch: it plans, and says of the rest what to install."""

import subprocess
import sys
from pathlib import Path

WITHOUT_TORCH = """
import importlib, sys
for name in ("torch", "safetensors", "tensorboard"):
    sys.modules[name] = None
from penstock import cli
for arguments in {commands!r}:
    sys.argv = ["penstock", *arguments]
    print(f"{{arguments[0]}}: {{cli.run()}}", file=sys.stderr)
"""


def run_without_torch(place: Path, commands: list[list[str]]) -> list[str]:
    program = WITHOUT_TORCH.format(commands=commands)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=place, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


def test_plans_are_made_played_compared_and_drawn(tmp_path: Path) -> None:
    problem = ["vgg-19", "--cluster", "dapple-c", "--batch", "64", "--quiet"]
    commands = [
        ["plan", *problem, "--planner", "gpipe", "-o", "plan.json", "--explain"],
        ["simulate", "plan.json", "--schedule", "gpipe", "--quiet"],
        ["simulate", "plan.json", "--picture", "timeline.html", "--quiet"],
        ["compare", *problem, "--planners", "single-device,gpipe", "--picture", "c.html"],
        ["list"],
        ["--help"],
    ]
    lines = run_without_torch(tmp_path, commands)
    assert lines == [f"{arguments[0]}: 0" for arguments in commands]


def test_what_needs_torch_says_what_to_install(tmp_path: Path) -> None:
    commands = [["train"], ["verify", "gpt-text"], ["profile", "gpt-text"], ["cluster"]]
    lines = run_without_torch(tmp_path, commands)
    told = "penstock: error: this needs 'torch', "
    assert [line.startswith(told) for line in lines[::2]] == [True] * len(commands)
    assert all(line.endswith("install penstock[train]") for line in lines[::2])
    assert lines[1::2] == [f"{arguments[0]}: 2" for arguments in commands]


def test_a_name_that_needs_torch_says_what_to_install(tmp_path: Path) -> None:
    program = "import sys; sys.modules['torch'] = None; from penstock import Pipeline"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: this needs 'torch'")
    assert last.endswith("install penstock[train]")
