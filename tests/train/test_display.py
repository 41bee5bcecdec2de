"""A run says how it goes: plain lines where there is no terminal."""

import pytest

from penstock.runtime.metrics import StepMetrics
from penstock.train.training_loop import Display


def metrics(step: int) -> StepMetrics:
    return StepMetrics(
        step=step,
        loss=2.5,
        gradient_norm=1.0,
        learning_rate=0.1,
        samples=16,
        seconds=0.5,
        bubble=0.25,
    )


def test_plain_lines_show_loss_throughput_and_bubble(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(0, 100, shown=True)
    for step in range(1, 101):
        display.step(step, metrics(step))
    display.note("done")
    display.close()
    output = capsys.readouterr()
    lines = output.err.splitlines()
    assert len(lines) == 21
    assert lines[0] == "step 5/100  loss 2.5000  32 samples/s  bubble 25%"
    assert lines[-1] == "done"
    assert output.out == ""


def test_nothing_is_shown_where_nothing_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(0, 10, shown=False)
    display.step(10, metrics(10))
    display.note("done")
    display.close()
    assert capsys.readouterr().err == ""
