"""The commands of the page on other frameworks run as printed, and find what its table says."""

import json
import re
from pathlib import Path

import pytest
from docs.test_pages import DOCS, blocks_in, succeed, texts, write_files

TEXT = (DOCS / "guides" / "other-frameworks.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (?:.+) \| `([\w-]+)` \| (\d+) ms \| ([\d.]+) % \|$", re.M)


@pytest.mark.timeout(600)
def test_the_commands_run_and_find_what_the_table_says(tmp_path: Path) -> None:
    blocks = blocks_in(TEXT)
    write_files(blocks, tmp_path)
    succeed(["bash", "-e", "-c", "".join(texts(blocks, "console"))], tmp_path)
    rows = ROW.findall(TEXT)
    assert [row[0] for row in rows] == ["1f1b", "1f1b", "zb-h1", "gpipe"]
    names = ("even", "plan", "zb", "naive")
    for (schedule, milliseconds, bubble), name in zip(rows, names, strict=True):
        found = json.loads((tmp_path / f"{name}.predicted.json").read_text(encoding="utf-8"))
        assert found["schedule"] == schedule
        assert round(1e3 * found["iteration_s"]) == int(milliseconds)
        assert f"{100 * found['bubble']:.1f}" == bubble
    layout = re.findall(r"^\| Penstock's.*?`(.+?)`", TEXT, re.M)[0].replace("\\|", "|")
    assert f"'{layout}'" in (tmp_path / "ours.txt").read_text(encoding="utf-8")
    torch = json.loads((tmp_path / "layout.json").read_text(encoding="utf-8"))
    assert torch["split_points"] == [f"model.layers.{block}" for block in (5, 10, 15)]
    assert torch["stages"][-1] == ["model.layers.15", "model.norm", "lm_head"]
    assert (tmp_path / "layout.csv").exists()


def test_the_page_names_every_framework() -> None:
    from penstock.integrations.bridges.formats import READERS, WRITERS

    assert {f"`{name}`" for name in WRITERS | READERS} <= set(re.findall(r"`[\w-]+`", TEXT))
