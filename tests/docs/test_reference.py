"""The reference names what is exported, and every key of a job and of a plan with its default."""

import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import errors
from penstock.capture.batch.lengths import Length
from penstock.plan.json_file import CostEntry, PlanEntry, StageEntry, read_plan
from penstock.runtime.tables import LossScaling, Weights
from penstock.train.job import Job, OptimizerSettings, TensorSettings
from penstock.train.job_file import KEYS
from penstock.train.samples import HELD_OUT

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "files.md").read_text(encoding="utf-8")
JOB_PART, PLAN_PART, _ = PAGE.split("\n## ")[1:]


TABLES = (TensorSettings, OptimizerSettings, LossScaling, Weights, Length)


def test_every_key_of_a_job_file_is_named() -> None:
    keys = {*KEYS} | {field.name for table in TABLES for field in fields(table)}
    # A setting of the runs that follow a given plan, which no file has.
    assert [key for key in sorted(keys - {"given"}) if f"`{key}`" not in JOB_PART] == []


@pytest.mark.parametrize("entry", [PlanEntry, StageEntry, CostEntry])
def test_every_key_of_a_plan_file_is_named(entry: Any) -> None:
    named = set(re.findall(r"`(\w+)`", PLAN_PART)) | {"format", "schema_version"}
    assert set(entry.model_fields) - named == set()


def defaults_of(of: Any) -> dict[str, Any]:
    # The share is of data that a job file makes, of which a job knows nothing.
    made = {"held_out": HELD_OUT} if of is Job else {}
    return {field.name: field.default for field in fields(of)} | made


@pytest.mark.parametrize("of", [Job, OptimizerSettings, LossScaling])
def test_defaults_are_those_of_the_code(of: Any) -> None:
    defaults = defaults_of(of)
    shown: dict[str, Any] = {}
    for key, cell in re.findall(r"^\| `(\w+)` \| ([^|]*) \|", table_of(of), re.MULTILINE):
        if re.fullmatch(r'"[\w-]+"|true|false|[\d.]+|\[.*\]', cell):
            shown[key] = tomllib.loads(f"value = {cell}")["value"]
    assert len(shown) >= 4
    for key, value in shown.items():
        default = defaults[key]
        assert value == (list(default) if isinstance(default, tuple) else default), key


def table_of(of: Any) -> str:
    """The part of the page with the table of ``of``."""
    begin = {Job: "## Job", OptimizerSettings: "`[optimizer]`:", LossScaling: "`[loss_scaling]` "}
    return PAGE.partition(f"\n{begin[of]}")[2].partition("\n\n`[")[0]


def test_the_plan_of_the_page_can_be_read(tmp_path: Path) -> None:
    (text,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "plan.json").write_text(text, encoding="utf-8")
    plan = read_plan(tmp_path / "plan.json")
    assert [stage.devices for stage in plan.stages] == [(0, 1), (2,)]
    assert plan.stages[1].recompute


def test_every_exported_name_is_in_the_reference() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "python.md").read_text("utf-8")
    described = set(re.findall(r"^::: penstock\.(\w+)$", page, re.MULTILINE)) - {"errors"}
    raised = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert described | raised >= set(penstock.__all__)
    assert described <= set(penstock.__all__)
