import subprocess
import sys
import time

import pytest

from penstock import waiting
from penstock.waiting import notice_if_long


@pytest.mark.parametrize(("seconds", "told"), [(0.2, ["planning"]), (0.0, [])])
def test_only_what_takes_long_is_told_and_once(
    seconds: float, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.05)
    heard = list[str]()
    with notice_if_long(heard.append, "planning"):
        time.sleep(seconds)
    time.sleep(0.1)
    assert heard == told


def test_nothing_is_told_of_what_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.05)
    heard = list[str]()
    with pytest.raises(ZeroDivisionError), notice_if_long(heard.append, "planning"):
        raise ZeroDivisionError
    time.sleep(0.1)
    assert heard == []


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("", "a line\n"),
        ("logging.getLogger('penstock').setLevel(logging.WARNING)", ""),
        ("logging.getLogger('penstock.runtime').setLevel(logging.WARNING)", ""),
        ("logging.basicConfig(format='%(name)s: %(message)s')", "penstock.runtime: a line\n"),
        ("logging.basicConfig(); waiting.print_bare_lines()", "a line\n"),
    ],
)
def test_a_program_has_the_last_word_on_lines(code: str, told: str) -> None:
    said = 'exec("say(\'a line\')", {"__name__": "penstock.runtime.world", "say": waiting.say})'
    program = f"import logging; from penstock import waiting; {code}\n{said}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", told)
