"""The commands of the page on large models, exactly as printed, after its program."""

import json
import re
import sys
from pathlib import Path

import pytest
from docs.test_pages import DOCS, blocks_in, succeed, texts, write_files

PAGE = DOCS / "guides" / "large-models.md"
TEXT, _, _ = PAGE.read_text(encoding="utf-8").partition("\n## Fine-tune on a few cards\n")
BLOCKS = blocks_in(TEXT)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_program_and_commands_print_and_plan_what_the_page_says(tmp_path: Path) -> None:
    write_files(BLOCKS, tmp_path)
    program = texts((block for block in BLOCKS if not block.file), "python")
    (tmp_path / "program.py").write_text("\n\n".join(program), encoding="utf-8")
    printed = succeed([sys.executable, "program.py"], tmp_path)
    said = texts(BLOCKS, "text")
    assert len(said) == 2
    assert [text for text in said if text not in printed] == []

    commands = [line for text in texts(BLOCKS, "console") for line in text.splitlines() if line]
    assert len(commands) == 6
    for command in commands:
        succeed(command.split(), tmp_path)
    plan_8b, plan_70b = (
        json.loads((tmp_path / f"{name}.predicted.json").read_text(encoding="utf-8"))
        for name in ("plan-8b", "plan-70b")
    )
    expected, narrowed = (float(re.search(r"([\d.]+) s a step", text)[1]) for text in said)  # type: ignore[index]
    assert plan_8b["iteration_s"] == pytest.approx(expected, rel=0.03)
    assert plan_8b["gap"] == pytest.approx(0.018, abs=0.002)
    assert plan_70b["iteration_s"] <= narrowed
    assert plan_70b["iteration_s"] == pytest.approx(25.6, abs=0.1)
    assert plan_70b["lower_bound_s"] == pytest.approx(16.9, abs=0.1)
    whole = json.loads((tmp_path / "plan-70b.json").read_text(encoding="utf-8"))
    assert (len(whole["stages"]), whole["micro_batch_size"]) == (16, 16)
    assert "<svg" in (tmp_path / "plan-8b.svg").read_text(encoding="utf-8")
    assert (tmp_path / "plan-70b.html").stat().st_size > 0
