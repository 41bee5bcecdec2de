"""The page on FSDP has the table that the command makes, and errors that are small enough."""

import sys

import pytest
from scripts import script_at


def test_the_page_has_the_table_and_the_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    fsdp = script_at("benchmarks/fsdp.py", "benchmark_of_fsdp")
    page = fsdp.PAGE.read_text(encoding="utf-8")
    assert fsdp.with_table(page, fsdp.HEADING, fsdp.table()) == page
    assert fsdp.summary() in page
    assert len(fsdp.RUNS) >= 10
    assert all(abs(fsdp.error_of(run)) < 0.15 for run in fsdp.RUNS)
    for run in fsdp.RUNS:
        # Nearly all messages pass behind computing.
        kept, again = fsdp.predictions(run)
        by_block, profile = run.recompute == "all", fsdp.problem_of(run).profile
        profile, found = (profile.by_block, again) if by_block else (profile, kept)
        layers = range(len(profile.layers))
        computing_s = profile.forward_s(layers, run.samples)
        computing_s += profile.backward_s(layers, run.samples)
        assert computing_s < found.iteration_s < 1.05 * computing_s
