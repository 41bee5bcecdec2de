"""Every file of the corpus of changed files is read, or refused in one short line, quickly."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from scripts import ROOT, script_at

from penstock.cluster.toml_file import ClusterEntry
from penstock.document import Entry, Table
from penstock.jobs.job_file import KEYS
from penstock.plan.json_file import PlanEntry
from penstock.profile.built_in import TableEntry
from penstock.profile.model_profile import GroupFactor, ModelProfile

FOLDER = ROOT / "benchmarks" / "reliability"
CORPUS = sorted((FOLDER / "corpus").glob("*/*"))
ENTRIES = {
    "cluster": ClusterEntry,
    "plan": PlanEntry,
    "profile": ModelProfile,
    "table": TableEntry,
}


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The benchmark that feeds changed files to the readers; all that they import is there."""
    before = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    script = script_at("benchmarks/reliability/readers.py", "reliability_readers")
    for name in sorted({path.parent.name for path in CORPUS}):
        script.read_starts(name, tmp_path_factory.mktemp(name))
    yield script
    sys.path[:] = before


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_file_of_the_corpus_is_read_or_refused(path: Path, readers: Any, tmp_path: Path) -> None:
    reader = sys.modules["formats"].READERS[path.parent.name]
    given = tmp_path / reader.file
    given.write_bytes(path.read_bytes())
    verdict = readers.judge(reader, given)
    assert verdict.kind in ("read", "refused"), verdict


def test_every_reader_has_a_good_file(readers: Any) -> None:
    assert all(readers.starts_of(name) for name in sys.modules["formats"].READERS)


@pytest.mark.parametrize("name", ENTRIES)
def test_the_good_files_have_every_key(name: str, readers: Any) -> None:
    text = b"\n".join(readers.starts_of(name)).decode()
    assert [key for key in keys_of(ENTRIES[name]) if key not in text] == []


def test_the_good_job_files_have_every_key(readers: Any) -> None:
    text = b"\n".join(readers.starts_of("job")).decode()
    assert [key for key in KEYS if not re.search(rf"^\[?{key}\b", text, re.MULTILINE)] == []


def keys_of(entry: Any) -> set[str]:
    """The keys of a document's table, and of all tables in it."""
    keys: set[str] = set()
    if issubclass(entry, Entry):
        kinds = {f.alias or name: f.annotation for name, f in entry.model_fields.items()}
    else:
        hints = get_type_hints(entry)
        kinds = {name: hints[name] for name in getattr(entry, "__dataclass_fields__", hints)}
    for name, annotation in kinds.items():
        keys.add(name)
        for inner in entries_in(annotation):
            keys |= keys_of(inner)
    return keys


def entries_in(annotation: Any) -> Iterator[Any]:
    """The tables of a type, such as those of a list of tables."""
    if isinstance(annotation, type) and issubclass(annotation, Entry | Table | GroupFactor):
        yield annotation
    for part in get_args(annotation):
        yield from entries_in(part)


def test_a_number_means_the_same_input_whatever_else_was_read(readers: Any) -> None:
    reader, starts = sys.modules["formats"].READERS["state"], readers.starts_of("state")
    numbers = (7, 8, 99_999)
    forwards = [readers.input_of("state", reader, starts, number) for number in numbers]
    backwards = [readers.input_of("state", reader, starts, number) for number in reversed(numbers)]
    assert forwards == backwards[::-1]
    assert len(set(forwards)) == len(numbers)
