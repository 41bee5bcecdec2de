"""How the layers of a model are divided among the ranks of a tensor group."""

from types import SimpleNamespace

import pytest
from torch import nn

from penstock.capture.cut.tensor_split import own_table
from penstock.errors import BadInput


def model(**told: str) -> nn.Module:
    """A model that says how its linear layers are divided, as those of transformers do."""
    made = nn.Module()
    made.model = nn.Linear(2, 2)
    made.base_model_prefix = "model"  # pyright: ignore
    made.config = SimpleNamespace(base_model_tp_plan=told)  # pyright: ignore
    return made


def test_what_a_model_says_of_linear_layers_is_read_and_nothing_else() -> None:
    told = {"up": "colwise", "down": "rowwise", "norm": "sequence_parallel", "experts": "gather"}
    assert own_table(model(**told)) == {"model.up": "colwise", "model.down": "rowwise"}


@pytest.mark.parametrize("told", [{}, {"norm": "sequence_parallel"}])
def test_a_model_that_says_nothing_of_them_is_refused(told: dict[str, str]) -> None:
    with pytest.raises(BadInput, match="Module does not say how its layers are divided"):
        own_table(model(**told))
