"""On a pipe a sentence is a line, whatever is in it."""

import pytest

from penstock.commands.terminal import Terminal


def test_no_sentence_is_broken_on_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    sentence = "no plan takes less, [because] of " + " and ".join(f"layer {k}" for k in range(60))
    Terminal(as_json=False, quiet=False).show({}, sentence, "[/x]")
    assert capsys.readouterr().out == f"{sentence}\n[/x]\n"
