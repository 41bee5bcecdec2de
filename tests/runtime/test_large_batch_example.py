"""Examples of large batches, divided parameters, rates, averages and stops run, and learn."""

import re
from pathlib import Path

from started_scripts import by_workers

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_example_trains_in_workers_that_torchrun_could_have_started() -> None:
    printed, _ = by_workers(EXAMPLES / "large_batch.py")
    match = re.fullmatch(r"step 30: loss (\d\.\d+) on 64 samples\nloss scale 65536\n", printed)
    assert match, printed
    assert float(match.group(1)) < 1.0


def test_the_rate_falls_and_averaged_weights_are_evaluated() -> None:
    printed, _ = by_workers(EXAMPLES / "plateau_and_average.py")
    match = re.fullmatch(r"rate (\S+), loss (\d\.\d+), (\d\.\d+) averaged\n", printed)
    assert match, printed
    assert float(match[1]) < 0.05
    assert float(match[2]) < 0.5 and float(match[3]) < 0.5 and match[2] != match[3]


def test_a_training_ends_when_it_gets_no_better_and_goes_back_to_its_best(tmp_path: Path) -> None:
    printed, _ = by_workers(EXAMPLES / "early_stop.py", tmp_path)
    match = re.fullmatch(r"ended after step (\d+), best after step (\d+): loss (0\.\d+)\n", printed)
    assert match, printed
    # Three evaluations follow, and the epoch of 8 steps in which all ranks agree.
    assert int(match[1]) - int(match[2]) == 4 * 8


def test_a_rank_keeps_half_of_the_parameters_while_it_trains() -> None:
    printed, _ = by_workers(EXAMPLES / "divided_parameters.py")
    match = re.fullmatch(r"step 30: loss (\d\.\d+); 866 of 1732 parameters here\n", printed)
    assert match, printed
    assert float(match.group(1)) < 1.1
