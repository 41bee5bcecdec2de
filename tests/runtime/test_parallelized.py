"""Functions that divide a model by torch's, Hugging Face's or the user's own means: what runs."""

import pytest
from runtime.parallelized_cases import (
    compiled,
    plans_of_transformers,
    refused,
    rows_that_run,
    summed_twice,
    two_groups,
    with_dropout,
)

from penstock.runtime.processes.launch import launch_workers

pytestmark = pytest.mark.timeout(280)


def test_styles_sequences_contexts_and_checkpoints_train_as_one_device() -> None:
    for found in launch_workers(rows_that_run, workers=3, threads=1):
        assert {name: wrong for name, wrong in found.items() if wrong} == {}


def test_two_stages_of_two_ranks_each_train_as_one_device() -> None:
    for found in launch_workers(two_groups, workers=4, threads=1):
        assert {name: wrong for name, wrong in found.items() if wrong} == {}


def test_blocks_that_the_function_compiles_train_as_one_device() -> None:
    for found in launch_workers(compiled, workers=3, threads=1):
        assert found == []


def test_ranks_of_a_group_drop_alike_so_that_whole_parameters_stay_equal() -> None:
    first, second, _ = launch_workers(with_dropout, workers=3, threads=1)
    assert first == second and len(first) == 9


def test_models_of_hugging_face_are_divided_by_its_own_plans() -> None:
    for found in launch_workers(plans_of_transformers, workers=3, threads=1):
        assert {name: wrong for name, wrong in found.items() if wrong} == {}


def test_gradients_that_a_hook_would_sum_twice_are_refused() -> None:
    for found in launch_workers(summed_twice, workers=3, threads=1)[:2]:
        assert found.startswith("BadInput: the stage of layers 0 to")
        assert "gets a hook on the gradient of 'model.layers.0.self_attn.k_norm.weight'" in found


REFUSED = {
    "another tensor": "another tensor that is no DTensor of the mesh that it was given",
    "another module": "tensor_parallel=with_another_module returns another model, or replaces mo",
    "another model": "tensor_parallel=with_another_model returns another model, or replaces modu",
    "one of two tied": "does not run on its shards",
    "batch norm": "has batch normalisation, which a tensor group cannot run",
    "a cut": "has the shape (4, 6, 8), and by the example (4, 6, 16), which the next stage rec",
}


def test_what_a_function_must_not_do_is_refused_before_the_first_step() -> None:
    for found in launch_workers(refused, workers=3, threads=1)[:2]:
        assert found.keys() == REFUSED.keys()
        for name, message in found.items():
            assert message.startswith("BadInput: ") and REFUSED[name] in message, (name, message)
