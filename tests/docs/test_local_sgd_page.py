"""Local SGD in the guide to several hosts: its script trains, and writes weights."""

from pathlib import Path

from docs.test_pages import DOCS, blocks_of, losses_in, texts, write_files
from safetensors.torch import load_file
from started_scripts import as_torchrun_would

PAGE = DOCS / "guides" / "several-hosts.md"


def test_the_script_trains_and_writes_weights(tmp_path: Path) -> None:
    write_files(blocks_of(PAGE), tmp_path)
    (command,) = (t for t in texts(blocks_of(PAGE), "console") if "local_sgd.py" in t)
    printed = as_torchrun_would(command.splitlines()[0], tmp_path)
    losses = losses_in(printed)
    assert len(losses) == 20 and losses[-1] < losses[0]
    files = list((tmp_path / "weights").glob("*.safetensors"))
    assert files and all(load_file(file) for file in files)
