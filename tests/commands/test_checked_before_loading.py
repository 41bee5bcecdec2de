"""What can be refused at once is refused before PyTorch is loaded and before a model is built."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands.refusals import refused

WITHOUT_TORCH = """
import sys
from penstock import cli
sys.argv = ["penstock", *sys.argv[1:]]
code = cli.run()
sys.exit("torch is loaded" if "torch" in sys.modules else code)
"""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train", "gpt-text", "-o", "file/run"], "cannot write to folder 'file/run'"),
        (["train", "gpt-text", "--save-weights", "file"], "cannot write to folder 'file'"),
        (["profile", "gpt-text", "-o", "none/p.json"], "folder 'none' does not exist"),
        (["verify", "gpt-text", "-o", "none/p.json"], "folder 'none' does not exist"),
        (["profile", "gpt-text", "--estimate", "A100"], "did you mean A100-40GB or A100-80GB?"),
        (["profile", "gpt-text", "--estimate", "h"], "mean H100-80GB or H200-141GB or H20-96GB?"),
        (["profile", "gpt-text", "--estimate", "TPU"], "use one of V100-16GB"),
        (["train", "bad.toml"], "bad.toml: optimizer: unknown key 'rate'; the keys are name, "),
        (["profile", "gpt-txt"], "did you mean 'gpt-text'?"),
        (["verify", "digits", "--set", "steps=many"], "steps is 'many'; input should be a valid"),
        (["train", "--set", "clip_norm=-1"], "clip_norm is -1; it must be >= 0"),
        (["train", "--set", "loss=mean"], "loss is 'mean'; write it as \"module:function\""),
        (["train", "--sharding", "optimizer", "--set", "meet_every=4"], "does not work with"),
        (["train", "--set", "shard_optimizer=true"], "unknown key 'shard_optimizer'; did you mean"),
        (["train", "--set", "lr=1"], "unknown key 'lr'; did you mean 'optimizer.learning_rate'?"),
        (["train", "--planner", "serach"], "did you mean 'search'?"),
        (["train", "--schedule", "1f2b"], "did you mean '1f1b'?"),
        (["train", "--set", "constraints.pin=[]"], "constraints: unknown key 'pin'; did you mean"),
    ],
)
def test_the_answer_comes_without_torch(tmp_path: Path, arguments: list[str], told: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "bad.toml").write_text('base = "digits"\noptimizer = { rate = 1.0 }\n')
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("penstock: error: ") and told in line
    assert {place.name for place in tmp_path.iterdir()} == {"file", "bad.toml"}


def test_json_is_not_written_under_another_ending(
    penstock: Callable[..., Any], tmp_path: Path
) -> None:
    problem = ["bert-48", "--cluster", "dapple-a", "--batch", "64", "--planners", "single-device"]
    answer = penstock("compare", *problem, "-o", tmp_path / "c.csv")
    refused(answer, 2, "would hold JSON, whatever its ending says")
    assert not list(tmp_path.iterdir())
    assert penstock("compare", *problem, "-o", tmp_path / "c.json", "--quiet").code == 0
