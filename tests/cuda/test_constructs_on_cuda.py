"""Stages of constructs that users write give the gradients of the user's own module on a GPU."""

import pytest
from capture.construct_cases import CASES
from capture.test_constructs import run
from gpu_device import DEVICE

from penstock.errors import PenstockError

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("way", ["together", "ranks"])
@pytest.mark.parametrize("name", CASES)
def test_stages_are_the_users_module(name: str, way: str) -> None:
    case = CASES[name]
    if case.outcome == "right":
        assert max(run(case, way, DEVICE)) < 1e-9
        return
    with pytest.raises(PenstockError, match=None if case.outcome == "refused" else case.outcome):
        run(case, way, DEVICE)
