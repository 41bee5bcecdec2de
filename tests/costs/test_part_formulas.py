"""The parts of plans that the core makes against their formulas, on random stages of every kind."""

from dataclasses import replace
from random import Random

import pytest
from random_pipelines import RandomPipeline, random_pipeline
from reference.part_formulas import PartFormula, earlier_at_home, messages_between

from penstock.plan.plan import SHARDINGS, Plan, Stage
from penstock.plan.problem import PlanningProblem
from penstock.profile.model_profile import ModelProfile
from penstock.schedule.action import ACTION_KINDS
from penstock.schedule.schedule import Schedule
from penstock.simulate.catalogue import Catalogue, workload_of
from penstock.simulate.instances import StageUse, updating

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


def copies_of(plan: Plan) -> list[list[Stage]]:
    """The stages on their devices and, if they are mirrored, on those of the opposite stages."""
    opposite = [
        replace(stage, devices=other.devices, slices=other.slices)
        for stage, other in zip(plan.stages, reversed(plan.stages), strict=True)
    ]
    return [[*plan.stages], opposite] if plan.mirrored else [[*plan.stages]]


def summed_bytes(plan: Plan, profile: ModelProfile) -> dict[tuple[int, ...], float]:
    """Bytes that several copies of stages hold, by the numbers of these."""
    ways, count = len(copies_of(plan)), len(plan.stages)
    found: dict[tuple[int, ...], float] = {}

    def add(stages: set[int], size_bytes: float) -> None:
        copies = tuple(sorted(way * count + stage for way in range(ways) for stage in stages))
        devices = {d for way in copies_of(plan) for stage in stages for d in way[stage].devices}
        if len(copies) > 1 and len(devices) > 1 and size_bytes:
            found[copies] = found.get(copies, 0.0) + size_bytes

    for tied in profile.shared:
        stages = {plan.stage_of_layer(layer) for layer in tied.layers}
        if len(stages) > 1 or plan.mirrored:
            add(stages, tied.bytes)
    for number, stage in enumerate(plan.stages):
        add({number}, sum(profile.layers[layer].parameter_bytes for layer in stage.layers))
    return found


def gradients_of(plan: Plan, schedule: Schedule) -> list[dict[int, list[str]]]:
    """In each order the actions that make gradients, by the copy of the stage that they are of."""
    found: list[dict[int, list[str]]] = []
    for order in schedule.orders:
        found.append({})
        for action in (one for one in order if one.kind in "BW"):
            odd = len(plan.stages) if plan.mirrored and action.micro_batch % 2 else 0
            found[-1].setdefault(action.stage + odd, []).append(action.kind)
    return found


@pytest.mark.parametrize("seed", range(200))
def test_a_pipeline_has_the_work_of_each_copy_of_its_stages_and_of_all_that_exchange_something(
    seed: int,
) -> None:
    made = random_pipeline(Random(seed), slots=True)
    plan, profile, weights = made.plan, made.profile, made.schedule.weights
    workload = workload_of(plan, profile, made.cluster, made.schedule)
    problem, count = PlanningProblem(profile, made.cluster, 8, (8,)), len(plan.stages)
    gradients, per_update = gradients_of(plan, made.schedule), weights.micro_batches_per_update
    works, boundaries = iter(workload.parts.stages), dict[tuple[int, int], object]()
    for way, stages in enumerate(copies_of(plan)):
        for number, stage in enumerate(stages):
            kinds = [of[k] for of in gradients for k in of if k == way * count + number]
            use = StageUse(
                any("W" in own[-1] for own in kinds),
                weights.versions_of(number),
                not plan.mirrored,
                weights.predictions_of(number),
            )
            formula = PartFormula(problem, stage, use, earlier_at_home(stages, number))
            work = next(works)
            assert work.devices == stage.devices
            for j, replica in enumerate(work.replicas):
                expected = [*(formula.seconds(j, kind) for kind in ACTION_KINDS), formula.step_s(j)]
                found = [*map(replica.seconds, ACTION_KINDS), replica.step_s]
                assert found == pytest.approx(expected, rel=ROUNDING)
            for sender, other in enumerate(stages[:number]):
                messages = messages_between(profile, made.cluster, stages, (sender, number))
                at_home = (other.devices, other.slices) == (stage.devices, stage.slices)
                if messages and (sender + 1 == number or not at_home):
                    boundaries[way * count + sender, way * count + number] = [*messages]
    assert next(works, None) is None
    assert boundaries == {
        (p, c): [(pair.sender, pair.receiver) for pair in boundary.pairs]
        for p, c, boundary in workload.parts.boundaries
    }
    found_bytes = {
        tuple(tie.stages): sum(share.buckets * share.bytes for share in tie.shares)
        for tie in workload.parts.ties
    }
    assert found_bytes == pytest.approx(summed_bytes(plan, profile))
    for order, own in zip(made.schedule.orders, gradients, strict=True):
        instances = [workload.instances.of(action) for action in order]
        marked = updating(order, instances, per_update).tolist()
        for instance, kinds in own.items():
            places = [i for i, a in enumerate(order) if instances[i] == instance and a.kind in "BW"]
            every = per_update or len(kinds)
            ends = [(k + 1) % every == 0 for k in range(len(kinds))]
            assert [marked[place] for place in places] == ends
        assert sum(marked) == sum(
            len(kinds) // (per_update or len(kinds)) for kinds in own.values()
        )
