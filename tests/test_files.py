"""Documents are refused in one line; files are written whole, and devices and pipes written to."""

import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import BadInput
from penstock.files import check_place, parse_json, parse_toml, write_text


def test_a_link_stays_a_link_to_the_file_that_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    link = tmp_path / "link.json"
    link.symlink_to(folder / "file.json")
    for text in ("first", "second"):
        write_text(link, text)
        assert link.is_symlink()
        assert (folder / "file.json").read_text() == text
    assert [path.name for path in folder.iterdir()] == ["file.json"]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    check_place(pipe)
    write_text(pipe, "through the pipe")
    reader.join(timeout=30)
    assert read == ["through the pipe"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_terminal_is_written_to(tmp_path: Path) -> None:
    controller, terminal = os.openpty()
    try:
        write_text(os.ttyname(terminal), "on the screen")
        assert os.read(controller, 100) == b"on the screen"
        assert stat.S_ISCHR(os.stat(os.ttyname(terminal)).st_mode)
    finally:
        os.close(terminal)
        os.close(controller)


def test_a_directory_is_refused_before_and_while_writing(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is a directory; name a file in it"):
        check_place(tmp_path)
    with pytest.raises(BadInput, match="Is a directory"):
        write_text(tmp_path, "nothing")


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_text(path, "old")
    with pytest.raises(BadInput, match="No such file or directory; name another place"):
        write_text(tmp_path / "absent" / "plan.json", "new")
    assert path.read_text() == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("parse", "form", "text", "problem"),
    [
        (parse_json, "JSON", '{"a": {"batch": 1, "rows": 2, "batch": 3}}', "'batch' stands twice"),
        (parse_json, "JSON", "[" * 100_000, "recursion"),
        (parse_json, "JSON", f'{{"batch": 1{"0" * 5000}}}', "digits"),
        (parse_json, "JSON", '{"batch": }', "line 1 column 11"),
        (parse_toml, "TOML", f"speed = 1{'0' * 5000}", "digits"),
        (parse_toml, "TOML", f"a = {'[' * 100_000}", "recursion"),
        (parse_toml, "TOML", "a = ]", "line 1, column 5"),
    ],
)
def test_what_a_parser_refuses_is_refused_in_one_short_line(
    parse: Any, form: str, text: str, problem: str
) -> None:
    with pytest.raises(BadInput) as found:
        parse(text, "cluster.file", "cluster")
    message = str(found.value)
    assert message.startswith(f"cluster 'cluster.file' is not valid {form}: ")
    assert problem in message
    assert len(message) < 200


def test_numbers_and_dotted_values_of_documents_are_read() -> None:
    text = '{"least": -9223372036854775808, "small": 1e-300, "list": [{"a": 1}, {"a": 2}]}'
    assert parse_json(text, "a.json", "plan") == {
        "least": -(2**63),
        "small": 1e-300,
        "list": [{"a": 1}, {"a": 2}],
    }
    dotted = f'a.b.c = "{"x." * 100}"'
    assert parse_toml(dotted, "a.toml", "job") == {"a": {"b": {"c": "x." * 100}}}


def test_a_message_that_repeats_a_long_value_keeps_its_beginning_and_its_end() -> None:
    message = str(BadInput(f"key 'a' is '{'x' * 5000}\n'; use 'b'"))
    assert len(message) <= 600
    assert message.startswith("key 'a' is 'xxx")
    assert message.endswith("xxx '; use 'b'")


def test_a_long_value_is_cut_where_it_is_and_not_the_remedy() -> None:
    remedy = "use 'b' " + "for one of many reasons " * 20
    message = str(BadInput(f"key 'a' is '{'x' * 5000}'; {remedy}"))
    assert len(message) <= 600
    assert message.endswith(f"x'; {remedy.strip()}")
