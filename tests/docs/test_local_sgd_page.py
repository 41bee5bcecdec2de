"""Local SGD in the guide to several hosts: its script trains, and writes weights."""

from pathlib import Path

from docs.test_pages import DOCS, blocks_of, command_of, losses_in, write_files
from safetensors.torch import load_file
from started_scripts import as_torchrun_would

PAGE = DOCS / "guides" / "several-hosts.md"


def test_the_script_trains_and_writes_weights(tmp_path: Path) -> None:
    write_files(blocks_of(PAGE), tmp_path)
    losses = losses_in(as_torchrun_would(command_of(PAGE, "local_sgd.py"), tmp_path))
    assert len(losses) == 20 and losses[-1] < losses[0]
    files = list((tmp_path / "weights").glob("*.safetensors"))
    assert files and all(load_file(file) for file in files)
