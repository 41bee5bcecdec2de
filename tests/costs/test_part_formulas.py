"""The parts of plans that the core makes against their formulas, on random stages of every kind."""

from dataclasses import replace
from random import Random

import pytest
from random_pipelines import RandomPipeline, random_pipeline
from reference.part_formulas import PartFormula, earlier_at_home, messages_between

from penstock.plan.plan import SHARDINGS, Stage
from penstock.plan.problem import PlanningProblem
from penstock.schedule.action import ACTION_KINDS
from penstock.simulate.catalogue import Catalogue
from penstock.simulate.instances import StageUse

ROUNDING = 1e-12


def varied(seed: int) -> tuple[RandomPipeline, Random]:
    """A random pipeline whose layers hold buffers and casts, and whose passes begin with a wait."""
    random = Random(seed)
    made = random_pipeline(random, slots=True)
    layers = tuple(
        replace(layer, buffer_bytes=random.randrange(999), cast_bytes=random.randrange(10**7))
        for layer in made.profile.layers
    )
    waits_s = {"stage_forward_s": random.choice([0.0, 0.2]), "stage_backward_s": random.random()}
    return replace(made, profile=replace(made.profile, layers=layers, **waits_s)), random


def random_stage(random: Random, layers: int, devices: int) -> Stage:
    lo = random.randrange(layers)
    run = range(lo, random.randint(lo + 1, layers))
    own = random.sample(range(devices), random.randint(1, min(3, devices)))
    rows = tuple(random.randint(1, 3) for _ in own)
    by_block, sharding = random.random() < 0.3, random.choice(SHARDINGS)
    return Stage(run, tuple(own), rows, by_block=by_block, sharding=sharding)


@pytest.mark.parametrize("seed", range(150))
def test_stages_are_those_of_the_formula(seed: int) -> None:
    made, random = varied(seed)
    catalogue = Catalogue(made.profile, made.cluster, 3.0)
    stage = random_stage(random, len(made.profile.layers), len(made.cluster.devices))
    use = StageUse(
        random.random() < 0.3, random.randint(1, 3), random.random() < 0.8, random.randint(0, 2)
    )
    problem = PlanningProblem(
        made.profile, made.cluster, 8, (8,), optimizer_bytes_per_parameter_byte=3.0
    )
    # Stages before it on its devices have received some of what it reads.
    cuts = sorted(random.choices(range(stage.layers.start + 1), k=4))
    earlier = tuple(range(lo, hi) for lo, hi in (cuts[:2], cuts[2:]) if lo < hi)
    runs = tuple((layers.start, layers.stop) for layers in earlier)
    found, formula = catalogue.stage(stage, use, runs), PartFormula(problem, stage, use, earlier)
    assert found.segment_layers == formula.segment_layers
    shares = [(s.segment, s.buckets, s.seconds, s.bytes) for s in found.shares]
    assert len(shares) == len(formula.shares)
    for own, expected in zip(shares, formula.shares, strict=True):
        assert own == pytest.approx(expected, rel=ROUNDING)
    for j, replica in enumerate(found.replicas):
        memory = replica.memory
        numbers = (*map(replica.seconds, ACTION_KINDS), replica.step_s, *replica.segments_s)
        held = (memory.fixed_bytes, memory.saved_bytes, memory.input_bytes, memory.workspace_bytes)
        assert (*numbers, *held) == pytest.approx(
            (
                *(formula.seconds(j, kind) for kind in ACTION_KINDS),
                formula.step_s(j),
                *formula.segments_s(j),
                *formula.memory(j),
            ),
            rel=ROUNDING,
        )


@pytest.mark.parametrize("seed", range(150))
def test_messages_are_those_of_the_formula(seed: int) -> None:
    made, _ = varied(seed)
    catalogue, stages = Catalogue(made.profile, made.cluster), made.plan.stages
    works = [
        catalogue.stage(
            stage,
            StageUse(),
            tuple((layers.start, layers.stop) for layers in earlier_at_home(stages, number)),
        )
        for number, stage in enumerate(stages)
    ]
    for consumer in range(len(stages)):
        for producer in range(consumer):
            expected = messages_between(made.profile, made.cluster, stages, (producer, consumer))
            pairs = catalogue.boundary(works[producer], works[consumer]).pairs
            assert [(pair.sender, pair.receiver) for pair in pairs] == list(expected)
            for pair, (down, up) in zip(pairs, expected.values(), strict=True):
                found = (pair.forward_s, pair.forward_bytes, pair.backward_s, pair.backward_bytes)
                assert found == pytest.approx((*down, *(up or (0.0, 0.0))), rel=ROUNDING)
                assert pair.returns == (up is not None)


@pytest.mark.parametrize("seed", range(50))
def test_tied_parameters_are_summed_over_all_their_devices(seed: int) -> None:
    made, random = varied(seed)
    catalogue, stages = Catalogue(made.profile, made.cluster), made.plan.stages
    works = [catalogue.stage(stage, StageUse()) for stage in stages]
    devices = tuple(dict.fromkeys(device for stage in stages for device in stage.devices))
    tie = catalogue.tie(tuple(range(len(stages))), [size := random.randrange(1, 10**8)], works)
    if len(devices) == 1:
        assert not tie.shares
        return
    (share,) = tie.shares
    rows = (1,) * len(devices)
    problem = PlanningProblem(made.profile, made.cluster, 8, (8,))
    formula = PartFormula(problem, Stage(range(1), devices, rows), StageUse())
    assert share.buckets * share.bytes == pytest.approx(size, rel=ROUNDING)
    assert share.seconds == pytest.approx(formula.sum_s(share.bytes), rel=ROUNDING)
