"""Lightning's own features on a pipeline: as on one device, or refused in one line.

Lightning takes seconds to import: only the tests that use it do.
"""

from pathlib import Path

import pytest
from started_scripts import by_workers

from penstock.errors import BadInput

CASES = Path(__file__).with_name("lightning_cases.py")


@pytest.mark.timeout(600)
def test_accumulation_plateaus_early_stops_and_values_of_epochs_are_those_of_one_device() -> None:
    one, two = (
        [line.split() for line in by_workers(CASES, ranks=ranks)[0].splitlines()]
        for ranks in (1, 2)
    )
    assert [line[:2] for line in two] == [line[:2] for line in one[:-1]] + [two[-1][:2]]
    assert len(one) == 5  # stopped after four epochs of six; then the weights
    for here, there in zip(two, one, strict=True):
        assert [float(n) for n in here[1:]] == pytest.approx(
            [float(n) for n in there[1:]], abs=2e-5
        )
    assert two[0][-1] == "0.500000" != two[-2][-1]


def test_what_a_step_has_no_place_for_is_refused() -> None:
    from integrations.loops.lightning_refusals import REFUSED, trainer_of

    from penstock.integrations.loops.lightning import check_supported

    for module, options, words in REFUSED:
        with pytest.raises(BadInput, match=words):
            check_supported(trainer_of(module(), "fit", **options))


def test_only_fit_is_of_a_pipeline() -> None:
    from integrations.loops.lightning_refusals import trainer_of
    from lightning import LightningModule

    from penstock.integrations.loops.lightning import check_supported

    with pytest.raises(BadInput, match="only fits"):
        check_supported(trainer_of(LightningModule(), "test"))


@pytest.mark.timeout(600)
def test_a_run_that_goes_on_keeps_the_plan_that_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "kept"))
    printed = by_workers(Path(__file__).with_name("lightning_resumed_cases.py"), tmp_path)[0]
    said = dict(line.split(": ") for line in printed.splitlines() if " stages, " in line)
    assert said["resumed"] == said["whole"] and said["whole"].startswith("2 stages")
    assert said["other"].startswith("1 stages")
    assert capfd.readouterr().err.count("the plan of the checkpoint is kept: ") == 1
