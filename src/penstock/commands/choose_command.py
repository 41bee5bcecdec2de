"""``penstock choose``: which cluster trains for the least money, and in which time."""

from math import inf
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from penstock.commands import options
from penstock.commands.job_commands import loading
from penstock.commands.terminal import Terminal, collect_garbage_rarely
from penstock.errors import BadInput, Infeasible

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.advice.choose_cluster import ClusterChoice
    from penstock.cluster.cluster import Cluster
    from penstock.profile.model_profile import ModelProfile


def choose(
    *,
    profile: Annotated[
        str,
        Argument(
            metavar="PROFILE",
            help="Estimate this job for each cluster's own device; or read this profile.",
        ),
    ],
    clusters: Annotated[
        str, Option(metavar="a,b", help="Plan for these: names or TOML files, with commas.")
    ],
    batch: options.Batch,
    tokens: Annotated[float | None, Option(min=0, metavar="N", help="Train on N tokens.")] = None,
    samples: Annotated[
        float | None, Option(min=0, metavar="N", help="Train on N samples, instead of --tokens.")
    ] = None,
    within: Annotated[
        float, Option(min=0, metavar="HOURS", help="End after HOURS at the latest (inf: any time).")
    ] = inf,
    planner: options.PlannerName = "search",
    profile_batch: options.ProfileBatch = None,
    foreign_times: Annotated[
        bool,
        Option("--foreign-times", help="Use the times of PROFILE's device for other kinds, too."),
    ] = False,
    csv: options.Csv = "",
    out: options.Out = "",
    terminal: Terminal,
) -> None:
    """Name the cheapest of several clusters to train PROFILE on.

    Without prices it names the fastest. -o writes the result as JSON.
    """
    collect_garbage_rarely()
    from penstock.advice.choose_cluster import choose_cluster, plan_on_clusters, samples_with_tokens
    from penstock.cluster.toml_file import find_cluster
    from penstock.plan.problem import foreign_kinds

    terminal.check_places(out, csv)
    amounts = [amount for amount in (tokens, samples) if amount]
    if len(amounts) != 1 or not amounts[0] < inf or not options.names_in(clusters):
        raise BadInput("say how long to train, by --tokens or --samples, on which --clusters")
    named = [find_cluster(name) for name in options.names_in(clusters)]
    every, named = costs_for(profile, profile_batch, named, terminal)
    for costs, cluster in zip(every, named, strict=True):
        for kind in foreign_kinds(costs, cluster) if foreign_times else ():
            terminal.note(f"{cluster.name}: the times of {costs.device} stand for {kind}")
    found = plan_on_clusters(
        every,
        named,
        batch,
        samples or samples_with_tokens(every[0], amounts[0]),
        planner=planner,
        foreign_times=foreign_times,
        on_cluster=lambda name: terminal.note(f"planning for {name}"),
    )
    chosen = choose_cluster(found, within)
    values: dict[str, object] = {
        "chosen": chosen.cluster.name,
        "clusters": [choice.to_json() for choice in found],
    }
    terminal.save(values, out)
    terminal.save_csv((choice.to_json() for choice in found), csv)
    limit = f" within {within:g} h" if within < inf else ""
    best, price = ("cheapest", f", {chosen.price:.4g}") if chosen.price else ("fastest", "")
    terminal.show(
        values,
        f"{best}{limit}: {chosen.cluster.name}, {chosen.hours:.3g} h{price}",
        choices_table(found),
        *(f"{c.cluster.name}: {c.outcome}" for c in found if c.hours == inf),
    )
    if not every[0].flops_per_sample:
        terminal.note(f"no MFU: profile '{every[0].name}' has no flops_per_sample")


def costs_for(
    name: str, profile_batch: int | None, clusters: "list[Cluster]", terminal: Terminal
) -> "tuple[list[ModelProfile], list[Cluster]]":
    """A profile for each cluster: estimated for its own device, if a job is named."""
    from penstock.profile.find import find_profile
    from penstock.train import JOBS

    if name not in JOBS and not name.endswith(".toml"):
        return [find_profile(name, profile_batch)] * len(clusters), clusters
    from penstock.measure.hardware import hardware_named
    from penstock.train.job_file import checked_table, job_of

    for device in (device for cluster in clusters for device in cluster.devices):
        hardware_named(device.kind)
    checked = checked_table(name)
    with loading(terminal.note):
        from penstock.train.profile_job import estimates_for
    return estimates_for(job_of(*checked), clusters)


def choices_table(choices: "list[ClusterChoice]") -> "Table":
    """A row for each cluster, cheapest first."""
    from penstock.plan.plan import plan_words
    from penstock.report.tables import plain_table
    from penstock.text import percent_text, seconds_text

    numbers = ("devices", "hours", "price", "an hour", "iteration", "samples/s", "MFU")
    table = plain_table(("cluster", "times of"), numbers)
    table.columns[0].no_wrap = True
    table.add_column("plan", overflow="fold")
    for choice in choices:
        name, devices = choice.cluster.name, str(len(choice.cluster.devices))
        outcome = choice.outcome
        if isinstance(outcome, Infeasible):
            table.add_row(name, choice.times_of, devices, "no plan", style="dim")
            continue
        rates = outcome.throughput
        table.add_row(
            name,
            choice.times_of or "-",
            devices,
            f"{choice.hours:.3g}",
            f"{choice.price:.4g}" if choice.price else "-",
            f"{rates.price_per_hour:g}" if choice.price else "-",
            seconds_text(outcome.prediction.iteration_s),
            f"{rates.samples_per_s:.3g}",
            percent_text(rates.mfu) if rates.mfu else "-",
            plan_words(outcome.plan),
        )
    return table
