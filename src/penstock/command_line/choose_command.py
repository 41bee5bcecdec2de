"""``penstock choose``: which cluster trains for the least money, and in which time."""

from math import inf
from typing import TYPE_CHECKING, Annotated

from typer import Option

from penstock.command_line import options
from penstock.command_line.terminal import Terminal, collect_garbage_rarely
from penstock.errors import BadInput, Infeasible

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.planning.hardware_choice import ClusterChoice


def choose(
    *,
    profile: options.ProfilePath,
    clusters: Annotated[
        str, Option(metavar="a,b", help="Clusters with prices: names or TOML files, with commas.")
    ],
    batch: options.Batch,
    tokens: Annotated[float, Option(min=0, metavar="N", help="Tokens to train on.")] = 0.0,
    samples: Annotated[float, Option(min=0, metavar="N", help="Or: samples to train on.")] = 0.0,
    within: Annotated[
        float, Option(min=0, metavar="HOURS", help="The latest end (0: any time will do).")
    ] = 0.0,
    planner: Annotated[str, Option(help="Name of a planner (see 'penstock list').")] = "search",
    profile_batch: options.ProfileBatch = 0,
    csv: options.Csv = "",
    out: options.Out = "",
    terminal: Terminal,
) -> None:
    """Name the cheapest of several clusters to train PROFILE on.

    -o writes the result as JSON.
    """
    collect_garbage_rarely()
    from penstock.cluster.toml_file import find_cluster
    from penstock.planning.hardware_choice import choose_cluster, plan_on_clusters, samples_of
    from penstock.profile.find import find_profile

    terminal.check_places(out, csv)
    asked = [amount for amount in (tokens, samples) if amount]
    if len(asked) != 1 or not asked[0] < inf or not options.names_in(clusters):
        raise BadInput("say how long to train, by --tokens or --samples, on which --clusters")
    costs = find_profile(profile, profile_batch or None)
    found = plan_on_clusters(
        costs,
        [find_cluster(name) for name in options.names_in(clusters)],
        batch,
        samples or samples_of(costs, tokens),
        planner=planner,
        on_cluster=lambda name: terminal.note(f"planning for {name}"),
    )
    chosen = choose_cluster(found, within if within > 0 else inf)
    values: dict[str, object] = {
        "chosen": chosen.cluster.name,
        "clusters": [choice.to_json() for choice in found],
    }
    terminal.save(values, out)
    terminal.save_csv((choice.to_json() for choice in found), csv)
    limit = f" within {within:g} h" if within else ""
    terminal.show(
        values,
        f"cheapest{limit}: {chosen.cluster.name}, {chosen.hours:.3g} h, {chosen.price:.4g}",
        table_of(found),
        *(f"{c.cluster.name}: {c.outcome}" for c in found if c.hours == inf),
    )
    if not costs.flops_per_sample:
        terminal.note(f"no MFU: profile '{costs.name}' has no flops_per_sample")


def table_of(choices: "list[ClusterChoice]") -> "Table":
    """A row for each cluster, cheapest first."""
    from penstock.plan.in_words import plan_words
    from penstock.report.tables import plain_table
    from penstock.words import percent_text, seconds_text

    numbers = ("devices", "hours", "price", "an hour", "iteration", "samples/s", "MFU")
    table = plain_table(("cluster",), numbers)
    table.columns[0].no_wrap = True
    table.add_column("plan", overflow="fold")
    for choice in choices:
        name, devices = choice.cluster.name, str(len(choice.cluster.devices))
        outcome = choice.outcome
        if isinstance(outcome, Infeasible):
            table.add_row(name, devices, "no plan", style="dim")
            continue
        rates = outcome.throughput
        table.add_row(
            name,
            devices,
            f"{choice.hours:.3g}",
            f"{choice.price:.4g}",
            f"{rates.price_per_hour:g}",
            seconds_text(outcome.prediction.iteration_s),
            f"{rates.samples_per_s:.3g}",
            percent_text(rates.mfu) if rates.mfu else "-",
            plan_words(outcome.plan),
        )
    return table
