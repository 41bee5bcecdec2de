"""Local SGD in the guide to several hosts: its script trains, and writes weights."""

import re
from pathlib import Path

from docs.test_pages import DOCS, blocks_of, write_files
from safetensors.torch import load_file
from started_scripts import as_torchrun_would

PAGE = DOCS / "guides" / "several-hosts.md"


def test_the_script_trains_and_writes_weights(tmp_path: Path) -> None:
    write_files(PAGE, tmp_path)
    commands = (b.text.splitlines()[0] for b in blocks_of(PAGE) if b.language == "console")
    (command,) = (command for command in commands if "local_sgd.py" in command)
    printed = as_torchrun_would(command, tmp_path)
    losses = [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", printed, re.MULTILINE)]
    assert len(losses) == 20 and losses[-1] < losses[0]
    files = list((tmp_path / "weights").glob("*.safetensors"))
    assert files and all(load_file(file) for file in files)
