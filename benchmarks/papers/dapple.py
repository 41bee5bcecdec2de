"""DAPPLE's planner (PPoPP 2021): over data parallelism, table V, and PipeDream's plans."""

from collections.abc import Iterator
from functools import cache
from statistics import mean

from claim import Claim
from reproduction.dapple_winners import CASES, TIE, best_of_form, form_of
from reproduction.published import ACRS, MEAN_LEADS, MODELS, MOST_OVER_DATA_PARALLEL, OVER_PIPEDREAM

from penstock.cluster.cluster import Cluster
from penstock.cluster.toml_file import find_cluster
from penstock.errors import Infeasible
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem
from penstock.planners.dapple.dapple import dapple
from penstock.planners.data_parallel import data_parallel
from penstock.planners.pipedream.pipedream import pipedream
from penstock.planners.problem import planning_problem
from penstock.profile.find import find_profile
from penstock.simulate.score import make_score

PAPER = "DAPPLE"
BATCH = 128
DEVICES = 16
FIVE = ("resnet-50", "vgg-19", "gnmt-16", "bert-48", "xlnet-36")
"""Models that fit on one device; AmoebaNet-36 has no data-parallel baseline."""

REDUCE_BYTES_PER_S = {"a": 3.0e9, "b": 3.0e9, "c": 1.25e9}
"""The rate of an all-reduce between servers in the released planner."""

GRPC_BYTES_PER_S = {"a": 0.8e9, "b": 0.8e9, "c": 0.32e9}
"""The rate of a message in the authors' analysis script."""

VARIANTS = {
    "the profiled micro-batch": (True, True, False),
    "no overlap in the baseline": (False, False, False),
    "the batches of table V": (False, True, True),
}
"""Other inputs: micro-batches as profiled, a baseline that does not overlap, table V's batches."""

RULES = {
    "any": (0, False),
    "the profiled": (1, False),
    "8 times the profiled": (8, False),
    "any; the paper's activation bytes": (0, True),
    "8 times the profiled; the paper's activation bytes": (8, True),
}
"""Sizes of micro-batches, as multiples of the profiled batch (0: any), and whether a layer keeps
for its backward its part of the paper's bytes per sample, or only its output."""


def planner_claims(quick: bool) -> Iterator[Claim]:
    """All claims; few of them with ``quick``."""
    yield from over_data_parallel("a" if quick else "abc")
    yield from acrs()
    if not quick:
        yield from against_pipedream()
        yield from winners()


def problem_for(
    model: str, cluster: Cluster, batch: int, micro_batch_size: int = 0
) -> PlanningProblem:
    """A problem whose memory may all be filled, so that nothing but time decides."""
    return planning_problem(
        MODELS[model].profile(),
        cluster,
        batch,
        micro_batch_size=micro_batch_size,
        memory_reserve=0.0,
        as_fast=0.0,
    )


@cache
def best_s(
    model: str, config: str, batch: int, *, profiled: bool = False, hybrid: bool = True
) -> float:
    """Seconds of an iteration by `dapple`'s plan, or by data parallelism's."""
    size = MODELS[model].profile_batch if profiled else 0
    problem = problem_for(model, find_cluster(f"dapple-{config}"), batch, size)
    score = make_score(problem)
    return score((dapple if hybrid else data_parallel)(problem, score))


def without_overlap_s(model: str, config: str, batch: int, devices: int = DEVICES) -> float:
    """Data parallelism whose all-reduce waits for the whole backward, by the closed form.

    On one server of cluster A, with 8 devices, the all-reduce goes over NVLink.
    """
    layers = MODELS[model].profile().layers
    compute_s = sum(layer.forward_s.at(batch) + layer.backward_s.at(batch) for layer in layers)
    parameter_bytes = sum(layer.parameter_bytes for layer in layers)
    inside = config == "a" and devices <= 8
    bytes_per_s = 25e9 if inside else REDUCE_BYTES_PER_S[config]
    return compute_s / devices + 2 * (devices - 1) / devices * parameter_bytes / bytes_per_s


def leads(config: str, profiled: bool, overlapped: bool, table_v: bool) -> dict[str, float]:
    """Data parallelism over the hybrid plan, by model."""
    found: dict[str, float] = {}
    for model in FIVE:
        batch = MODELS[model].global_batch if table_v else BATCH
        if overlapped:
            baseline_s = best_s(model, config, batch, hybrid=False)
        else:
            baseline_s = without_overlap_s(model, config, batch)
        found[model] = baseline_s / best_s(model, config, batch, profiled=profiled)
    return found


def over_data_parallel(configs: str) -> Iterator[Claim]:
    """The hybrid plan over the best data parallelism: means, and the largest."""
    for config in configs:
        base = leads(config, False, True, False)
        varied = {name: leads(config, *inputs) for name, inputs in VARIANTS.items()}
        yield Claim(
            PAPER,
            "hybrid over data parallelism, mean of five models",
            f"{config.upper()}, 128 samples; "
            + ", ".join(f"{model} {lead:.2f}x" for model, lead in base.items()),
            MEAN_LEADS[config],
            mean(base.values()),
            varied={name: mean(found.values()) for name, found in varied.items()},
        )
        if config == "c":
            model = "gnmt-16"
            yield Claim(
                PAPER,
                "hybrid over data parallelism, the most",
                "GNMT-16, C, 128 samples",
                MOST_OVER_DATA_PARALLEL,
                base[model],
                varied={name: found[model] for name, found in varied.items()},
            )


@cache
def winners_rows() -> tuple[dict[str, str | float], ...]:
    """Table V beside what `dapple` chooses, for each rule of micro-batches."""
    rows: list[dict[str, str | float]] = []
    for (model, cluster, form), (rule, (times, text_bytes)) in (
        (case, rule) for case in CASES for rule in RULES.items()
    ):
        published = MODELS[model]
        size = min(times * published.profile_batch, published.global_batch)
        problem = published.problem(cluster, size, text_bytes=text_bytes)
        score = make_score(problem)
        try:
            plan = dapple(problem, score)
            form_s = best_of_form(problem, form, score)
        except (Infeasible, ValueError):  # no plan of the form has rows for all its devices
            continue
        rows.append(
            {
                "model": model,
                "cluster": cluster[-1].upper(),
                "published": form,
                "rule": rule,
                "form": form_of(plan),
                "split": split_of(plan),
                "over_form": form_s / score(plan),
            }
        )
    return tuple(rows)


def split_of(plan: Plan) -> str:
    """The layers of each stage, of at most three."""
    counts = [len(stage.layers) for stage in plan.stages]
    return ":".join(map(str, counts)) if 1 < len(counts) <= 3 else ""


def winners() -> Iterator[Claim]:
    """The number of table V's plans that are found, or tied with, and of any better than ours."""
    first, *others = RULES
    found = {
        rule: sum(is_found(row) for row in winners_rows() if row["rule"] == rule) for rule in RULES
    }
    setting = "6 models on A, B and C, micro-batches of any size"
    unit = f"of {len(CASES)}"
    yield Claim(
        PAPER,
        "plans of table V that `dapple` finds, or that are within 3 % of its plan",
        setting,
        len(CASES),
        found[first],
        unit=unit,
        varied={rule: found[rule] for rule in others},
    )
    behind = sum(is_no_slower(row) for row in winners_rows() if row["rule"] == first)
    what = "plans of table V that are no faster than the plan of `dapple`"
    yield Claim(PAPER, what, setting, None, behind, unit=unit)


def is_found(row: dict[str, str | float]) -> bool:
    """Return whether a row's plan has the published form, or the form is about as fast."""
    return row["form"] == row["published"] or float(row["over_form"]) <= TIE


def is_no_slower(row: dict[str, str | float]) -> bool:
    """Return whether no plan of the published form is faster by more than 3 %."""
    return float(row["over_form"]) * TIE >= 1


def acrs() -> Iterator[Claim]:
    """The column "ACR" of table V where the boundary is beyond doubt."""
    for (model, config, stages), printed in ACRS.items():
        profile = find_profile(model)
        samples, layers = profile.batch_size, profile.layers
        busy_s = sum(layer.forward_s.at(samples) + layer.backward_s.at(samples) for layer in layers)
        edge = next(e for e in profile.edges if e.producer == len(layers) // 2)
        moved_bytes = edge.bytes.at(samples) + edge.gradient_bytes.at(samples)
        yield Claim(
            PAPER,
            "communication over compute (ACR)",
            f"{model}, {config.upper()}, {stages} stages",
            printed,
            moved_bytes / GRPC_BYTES_PER_S[config] / (busy_s / stages),
            unit="",
            decimals=2,
        )


def against_pipedream() -> Iterator[Claim]:
    """The headline, of VGG-19, by our planners and our simulator."""
    yield Claim(
        PAPER,
        "over PipeDream's plan, VGG-19: our planners, our simulator",
        "A, 2,048 samples, micro-batches of any size",
        OVER_PIPEDREAM,
        planned_ratio("vgg-19", 0),
        varied={f"micro-batches of {size}": planned_ratio("vgg-19", size) for size in (32, 256)},
    )


def planned_ratio(model: str, micro_batch_size: int) -> float:
    """Seconds of our `pipedream` over our `dapple`."""
    problem = MODELS[model].problem("dapple-a", micro_batch_size)
    score = make_score(problem)
    return score(pipedream(problem, score)) / score(dapple(problem, score))
