"""What the processes run that a page's examples are tried in."""

import os
import runpy
import sys
from pathlib import Path


def run_file(folder: Path, file: str) -> None:
    """Run a program in its folder, as Python does; what it prints goes to a file beside it."""
    os.chdir(folder)
    sys.argv, sys.path[0] = [file], str(folder)
    with Path("printed.txt").open("w", encoding="utf-8") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
        runpy.run_path(file, run_name="__main__")
        sys.stdout.flush()
