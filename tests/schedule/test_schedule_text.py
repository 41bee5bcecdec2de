"""The picture of a schedule can be read back."""

import pytest

from penstock.errors import BadInput
from penstock.schedule.schedule import parse_schedule


def test_two_stages_on_one_group_are_read_back() -> None:
    picture = "stage 0,2 0F0 2F0 2B0 0B0\nstage 1   F0 B0"
    schedule = parse_schedule(picture)
    assert str(schedule) == picture
    assert schedule.of(0)[1].stage == 2


@pytest.mark.parametrize("text", ["group 0  F0", "stage 0  F0 X1", "stage 0,1  F0", "stage  F0"])
def test_text_that_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match=r"stage|action"):
        parse_schedule(text)
