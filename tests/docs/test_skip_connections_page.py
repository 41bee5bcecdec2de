"""Skip connections in the guide to losses: the script trains as one process, with its messages."""

from pathlib import Path

import pytest
from docs.test_pages import (
    DOCS,
    PRINTED,
    blocks_of,
    command_of,
    losses_in,
    plain_losses,
    texts,
    write_files,
)
from scripts import script_at
from started_scripts import as_torchrun_would

from penstock.plan.plan import Plan, Stage

PAGE = DOCS / "guides" / "losses.md"


@pytest.mark.parametrize(("devices", "each"), [(2, 3), (3, 1), (8, 4)])
def test_so_many_results_are_sent_where_each_stage_reads_all_earlier_ones(
    devices: int, each: int
) -> None:
    count = devices * each
    stages = tuple(Stage(range(s, s + 1), (s % devices,), (1,)) for s in range(count))
    plan = Plan(stages, 1, 1, "interleaved")
    sent = [
        (sender, reader)
        for maker in range(count)
        for sender, reader in plan.senders(maker, range(maker + 1, count))
        if plan.homes[sender] != plan.homes[reader]
    ]
    assert len(sent) == devices * (devices - 1) * (each - 1 / 2)


def test_the_script_trains_as_one_process_does(tmp_path: Path) -> None:
    write_files(blocks_of(PAGE), tmp_path)
    printed = as_torchrun_would(command_of(PAGE, "residuals.py"), tmp_path)
    assert printed.endswith(next(t for t in texts(blocks_of(PAGE), "text") if " messages, " in t))
    script = script_at(str(tmp_path / "residuals.py"), "residuals_of_the_guide")
    plain = plain_losses(script, script.optimizer, 10)
    assert losses_in(printed) == pytest.approx(plain, rel=1e-4, abs=PRINTED)
