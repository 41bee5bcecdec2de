"""``penstock cluster`` and ``launch``: the hosts of a job, and what starts it on them."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from penstock.commands import options
from penstock.commands.terminal import Terminal
from penstock.errors import BadInput

if TYPE_CHECKING:
    from penstock.cluster.cluster import Cluster


def cluster(
    *,
    device: options.Device = "cpu",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        Option("--type", help="Measure speeds in this type: that of the job's products."),
    ] = "float32",
    out: options.Out = "",
    terminal: Terminal,
) -> None:
    """Measure the hosts that torchrun or srun has started it on.

    Devices and links are measured. -o writes the cluster as TOML, which planning reads.
    """
    from penstock.runtime.processes.srun import one_of_several

    started = one_of_several()
    terminal = replace(terminal, quiet=terminal.quiet or started.rank > 0)
    import torch

    from penstock.cluster.toml_file import write_cluster
    from penstock.report.tables import cluster_table
    from penstock.train.live_cluster import measure_cluster
    from penstock.train.profile_job import device_note

    terminal.check_places(out)
    if note := device_note(device, started.ranks):
        terminal.note(note)
    terminal.note(f"measuring {started.ranks} rank(s) and the links between them")
    found = measure_cluster(device, getattr(torch, dtype))
    if started.rank:
        return
    if out:
        write_cluster(found.cluster, out)
        terminal.note(f"wrote {out}")
    values: dict[str, object] = {
        "hosts": [
            {
                "name": host.name,
                "devices": len(host.devices),
                "link_bytes_per_s": host.link_bytes_per_s,
                "port_bytes_per_s": host.port_bytes_per_s,
            }
            for host in found.cluster.hosts
        ],
        "links": [[link.source, link.target, link.bytes_per_s] for link in found.cluster.links],
        "slowest": list(found.slow),
    }
    terminal.show(values, cluster_table(found.cluster), *(f"slow: {text}" for text in found.slow))


def launch(
    *,
    job: options.JobName,
    torchrun: Annotated[
        bool, Option("--torchrun", help="Write a script to run on every host, by torchrun.")
    ] = False,
    slurm: Annotated[bool, Option("--slurm", help="Write a script for sbatch.")] = False,
    cluster: Annotated[
        str, Option(metavar="C", help="Use the hosts of this cluster (default: the plan's).")
    ] = "",
    plan: options.PlanToFollow = "",
    run: Annotated[
        str, Option(metavar="DIR", help="Write the run there, on a disk that all hosts share.")
    ] = "",
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Option(help="Run the layers there (auto: on GPUs, if the cluster has some)."),
    ] = "auto",
    out: options.Out = "",
    terminal: Terminal,
) -> None:
    """Write what starts JOB on several hosts, in the plan's order."""
    from penstock.advice.plan_files import cluster_of_plan
    from penstock.files import write_text
    from penstock.plan.json_file import read_plan
    from penstock.train.launch_script import Start, slurm_script, torchrun_script

    if torchrun == slurm:
        raise BadInput("name one of --torchrun, --slurm")
    terminal.check_places(out)
    hosts = cluster_of_plan(plan, cluster)
    directory = run or f"runs/{Path(job).stem}"
    arguments = (job, "--out", directory, *(("--plan", plan) if plan else ()))
    needed = max(read_plan(plan).ranks) + 1 if plan else 0
    if needed > len(hosts.devices):
        raise BadInput(
            f"plan '{plan}' uses ranks 0 to {needed - 1}, but the hosts have {len(hosts.devices)} "
            f"ranks; name its cluster with --cluster, or plan again"
        )
    on_gpus = runs_on_gpus(device, hosts, terminal)
    start = Start(
        Path(job).stem,
        (*arguments, *(("--device", "cuda") if on_gpus else ())),
        directory,
        tuple((host.name, len(host.devices)) for host in hosts.hosts),
        on_gpus=on_gpus,
    )
    script = torchrun_script(start) if torchrun else slurm_script(start)
    if out:
        write_text(out, script)
        each = ", ".join(f"{name} x {ranks}" for name, ranks in start.hosts)
        terminal.note(f"wrote {out}: {start.ranks} ranks, {each}")
    terminal.show_text({"script": script}, "" if out else script)


def runs_on_gpus(device: str, cluster: "Cluster", terminal: Terminal) -> bool:
    """Return whether ranks run on GPUs: by ``device``, or for ``auto`` if the cluster has some.

    Note a cluster of other devices than ``device``, and what has been tried on several GPUs.
    """
    from penstock.train import SEVERAL_GPUS

    kinds = ", ".join(dict.fromkeys(each.kind for each in cluster.devices))
    has_gpus = any(each.kind.lower() != "cpu" for each in cluster.devices)
    on_gpus = device == "cuda" if device != "auto" else has_gpus
    if on_gpus != has_gpus:
        terminal.note(f"the devices of cluster '{cluster.name}' are {kinds}, not {device}")
    if on_gpus and len(cluster.devices) > 1:
        terminal.note(SEVERAL_GPUS)
    return on_gpus
