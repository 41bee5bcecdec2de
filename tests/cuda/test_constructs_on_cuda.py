"""Stages of constructs that users write give the gradients of the user's own module on a GPU."""

import os

import pytest
from capture.construct_cases import CASES
from capture.test_constructs import run

from penstock.errors import PenstockError

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("way", ["together", "ranks"])
@pytest.mark.parametrize("name", CASES)
def test_stages_are_the_users_module(name: str, way: str) -> None:
    case, device = CASES[name], os.environ.get("PENSTOCK_TEST_DEVICE", "cuda")
    if case.outcome == "right":
        assert max(run(case, way, device)) < 1e-9
        return
    with pytest.raises(PenstockError, match=None if case.outcome == "refused" else case.outcome):
        run(case, way, device)
