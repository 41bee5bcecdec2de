"""The tables of all runs of layers against the profile's own sums."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_strategies import profiles
from reference.crossing import crossing, first_of_each_tensor
from reference.stage_formula import crossing_bytes

from penstock.cluster.toml_file import local_cluster
from penstock.costs.run_tables import at, run_tables, runs_at, workspace_table
from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import Affine, ModelProfile


@given(profiles(max_layers=6), st.integers(1, 8))
def test_every_entry_is_the_profiles_sum_over_that_run(profile: ModelProfile, rows: int):
    problem = PlanningProblem(profile, local_cluster(1, 1, 1e9), 8, (8,))
    tables = run_tables(problem)
    workspaces = workspace_table(profile, rows)
    for cut in range(len(profile.layers) + 1):
        for sizes, name in ((tables.down, "bytes"), (tables.up, "gradient_bytes")):
            expected = crossing_bytes(profile, cut, name)
            found = Affine(*sizes[:, cut].tolist())
            assert found.at(rows) == pytest.approx(expected.at(rows))
    for lo, hi in combinations(range(len(profile.layers) + 1), 2):
        run = range(lo, hi)
        read = (edge for edge in crossing(profile)[lo] if edge.consumer in run)
        inputs = sum(edge.bytes.at(rows) for edge in first_of_each_tensor(read))
        buffers = sum(profile.layers[i].buffer_bytes for i in run)
        expected = {
            "forward": profile.forward_s(run, rows),
            "backward": profile.backward_s(run, rows),
            "saved": sum(profile.layers[i].saved_bytes.at(rows) for i in run),
            "inputs": inputs,
            "parameters": profile.parameter_bytes(run),
            "held": 4 * profile.parameter_bytes(run) + buffers,
            "workspace": max(profile.layers[i].workspace_bytes.at(rows) for i in run),
        }
        found = {
            "forward": runs_at(tables.forward, rows)[lo, hi],
            "backward": runs_at(tables.backward, rows)[lo, hi],
            "saved": runs_at(tables.saved, rows)[lo, hi],
            "inputs": at(tables.inputs, rows)[lo, hi],
            "parameters": tables.parameters[lo, hi],
            "held": tables.held[lo, hi],
            "workspace": workspaces[lo, hi],
        }
        assert found == pytest.approx(expected)
