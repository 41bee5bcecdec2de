"""Every file of the corpus of changed files is read, or refused in one short line, quickly."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripts import ROOT, script_at

FOLDER = ROOT / "benchmarks" / "reliability"
CORPUS = sorted((FOLDER / "corpus").glob("*/*"))


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
