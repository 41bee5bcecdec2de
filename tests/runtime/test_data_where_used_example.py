"""The example of data that are read where they are used runs, and says what each rank reads."""

import re
from pathlib import Path

import numpy as np
from started_scripts import by_workers

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "data_where_used.py"
GUIDE = ROOT / "docs" / "guides" / "data.md"


def test_each_rank_prints_what_it_reads(tmp_path: Path) -> None:
    points = np.random.default_rng(0).standard_normal((2048, 16), np.float32)
    files = [str(tmp_path / name) for name in ("points.npy", "classes.npy")]
    np.save(files[0], points)
    np.save(files[1], (points[:, :8].sum(1) > points[:, 8:].sum(1)).astype(np.int64))
    found = by_workers(EXAMPLE, *files, ranks=4)
    shown = re.search(r"```text\n(rank 0 reads .*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    assert shown is not None
    lines = [line for rank in found for line in rank.splitlines()]
    assert [line for line in lines if line.startswith("rank ")] == shown[1].splitlines()
    (last,) = (line for line in lines if line.startswith("step "))
    assert re.fullmatch(r"step 64: loss 0\.\d{4}", last)
    assert float(last.split()[-1]) < 0.3
