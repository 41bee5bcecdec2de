"""The example of overlapping iterations runs, and learns as a run without the option does."""

import re
from pathlib import Path

from runtime.processes.workers_under_test import run_script

from penstock.runtime.processes.launch import launch_workers

EXAMPLE = Path(__file__).parents[3] / "examples" / "overlapped_iterations.py"


def test_the_example_prints_what_it_would_print_without_overlap(tmp_path: Path) -> None:
    printed, _ = launch_workers(run_script, (str(EXAMPLE), []), workers=2, threads=1)
    match = re.fullmatch(r"step 60: loss (\d\.\d+), gradient norm \d\.\d+\n", printed)
    assert match, printed
    assert float(match.group(1)) < 1.0
    plain = tmp_path / "plain.py"
    option, source = '    update=penstock.Update(optimizer_sync="after"),\n', EXAMPLE.read_text()
    assert option in source
    plain.write_text(source.replace(option, ""))
    assert launch_workers(run_script, (str(plain), []), workers=2, threads=1)[0] == printed
