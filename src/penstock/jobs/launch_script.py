"""Writes what starts a job on several hosts: a script for torchrun or Slurm, or a manifest.

Ranks are numbered host by host, in the order of the cluster, for so a plan numbers its devices.
"""

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.errors import BadInput

__all__ = ["LAUNCHERS", "Start", "kubernetes_manifest", "slurm_script", "torchrun_script"]

PORT = 29_500
SAVES_WITHIN_S = 120
"""How long before the end Slurm sends SIGTERM. A run then takes its step to the end and saves."""


@dataclass(frozen=True)
class Start:
    """What to start: the arguments of ``penstock train``, and the ranks of each host by its name.

    ``run_directory`` is on a disk of all hosts. ``image`` is a container's, for Kubernetes.

    Raises:
        BadInput: no host, or a host without ranks.
    """

    name: str
    arguments: tuple[str, ...]
    run_directory: str
    hosts: tuple[tuple[str, int], ...]
    on_gpus: bool = False
    image: str = ""

    def __post_init__(self) -> None:
        if not self.hosts or min(ranks for _, ranks in self.hosts) < 1:
            raise BadInput("a job starts on at least one host, and each has at least one rank")

    @property
    def ranks(self) -> int:
        return sum(ranks for _, ranks in self.hosts)

    @property
    def command(self) -> str:
        """The command of a rank. A run that has been planned before is resumed."""
        return f"penstock train {shlex.join(self.arguments)} $resume"

    @property
    def resumed(self) -> str:
        """A line of shell that sets ``resume`` for `command`."""
        place = shlex.quote(f"{self.run_directory}/plan.json")
        return f'resume=""; [ -e {place} ] && resume="--resume"'


def torchrun_script(start: Start) -> str:
    """A script to run on every host, with the host's number."""
    names = [name for name, _ in start.hosts]
    counts = " ".join(str(ranks) for _, ranks in start.hosts)
    return "\n".join(
        [
            "#!/bin/bash",
            f"# Starts job '{start.name}' on {len(names)} host(s). Run it on each of them,",
            "# with its number: "
            + ", ".join(f"{number} on {name}" for number, name in enumerate(names)),
            "set -euo pipefail",
            'node="${1:?give the number of this host, from 0}"',
            f"ranks=({counts})",
            start.resumed,
            # More threads than one would be set by the user, who knows the cores.
            'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"',
            f'exec torchrun --nnodes={len(names)} --node-rank="$node" \\',
            '    --nproc-per-node="${ranks[$node]}" \\',
            f'    --master-addr="${{MASTER_ADDR:-{names[0]}}}" \\',
            f'    --master-port="${{MASTER_PORT:-{PORT}}}" --no-python \\',
            f"    {start.command}",
            "",
        ]
    )


def slurm_script(start: Start) -> str:
    """A script for sbatch. Slurm may choose the nodes; each gets the ranks of a host."""
    counts = " ".join(str(ranks) for _, ranks in start.hosts)
    most = max(ranks for _, ranks in start.hosts)
    gpus = [f"#SBATCH --gpus-per-node={most}"] if start.on_gpus else []
    return "\n".join(
        [
            "#!/bin/bash",
            f"#SBATCH --job-name=penstock-{start.name}",
            f"#SBATCH --nodes={len(start.hosts)}",
            f"#SBATCH --ntasks={start.ranks}",
            *gpus,
            "#SBATCH --requeue",
            f"#SBATCH --signal=TERM@{SAVES_WITHIN_S}",
            "# A host of the plan is a node of the job, in the order of both.",
            "set -euo pipefail",
            'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            f"ranks=({counts})",
            'if [ "${#nodes[@]}" -lt "${#ranks[@]}" ]; then',
            '    echo "the job got ${#nodes[@]} node(s), and its plan is for ${#ranks[@]}" >&2',
            "    exit 2",
            "fi",
            'export SLURM_HOSTFILE="$SLURM_SUBMIT_DIR/.penstock-hosts-$SLURM_JOB_ID"',
            "trap 'rm -f \"$SLURM_HOSTFILE\"' EXIT",
            'for host in "${!ranks[@]}"; do',
            '    for _ in $(seq "${ranks[$host]}"); do echo "${nodes[$host]}"; done',
            'done > "$SLURM_HOSTFILE"',
            start.resumed,
            'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"',
            f"srun --distribution=arbitrary --ntasks={start.ranks} --kill-on-bad-exit \\",
            f"    {start.command}",
            "",
        ]
    )


def kubernetes_manifest(start: Start) -> str:
    """An indexed Job with a pod for each host, and the service by which pods find the first one.

    Raises:
        BadInput: no image, or hosts with different numbers of ranks, which one pod template lacks.
    """
    counts = sorted({ranks for _, ranks in start.hosts})
    if not start.image:
        raise BadInput("a pod needs a container's image with penstock and the job; give --image")
    if len(counts) > 1:
        raise BadInput(
            f"hosts have {counts} ranks, and all pods of a Kubernetes job are alike; plan for "
            f"hosts with equally many, or use --torchrun"
        )
    (ranks,) = counts
    name, hosts = f"penstock-{start.name}".lower().replace("_", "-"), len(start.hosts)
    runs = json.dumps(parent_of(start.run_directory))
    shell = [
        "set -eu",
        start.resumed,
        f"exec torchrun --nnodes={hosts} --node-rank=$JOB_COMPLETION_INDEX "
        f"--nproc-per-node={ranks} --master-addr={name}-0.{name} --master-port={PORT} "
        f"--no-python {start.command}",
    ]
    return "\n".join(
        [
            "apiVersion: v1",
            "kind: Service",
            f"metadata: {{name: {name}}}",
            f"spec: {{clusterIP: None, selector: {{job-name: {name}}}}}",
            "---",
            "apiVersion: batch/v1",
            "kind: Job",
            f"metadata: {{name: {name}}}",
            "spec:",
            f"  completions: {hosts}",
            f"  parallelism: {hosts}",
            "  completionMode: Indexed",
            f"  backoffLimit: {3 * hosts}",
            "  template:",
            "    spec:",
            f"      subdomain: {name}",
            "      restartPolicy: OnFailure",
            "      containers:",
            "        - name: ranks",
            f"          image: {json.dumps(start.image)}",
            "          command: [bash, -c]",
            "          args:",
            "            - |",
            *(f"              {line}" for line in shell),
            "          env:",
            "            - {name: OMP_NUM_THREADS, value: '1'}",
            *([f"          resources: {{limits: {{nvidia.com/gpu: {ranks}}}}}"] * start.on_gpus),
            "          volumeMounts:",
            f"            - {{name: runs, mountPath: {runs}}}",
            "      volumes:",
            f"        - {{name: runs, persistentVolumeClaim: {{claimName: {name}}}}}",
            "",
        ]
    )


def parent_of(run_directory: str) -> str:
    """The folder of the run directory, where the volume of all pods is mounted.

    Raises:
        BadInput: it is a relative path, which means another place in each pod.
    """
    folder, _, _ = run_directory.rstrip("/").rpartition("/")
    if not folder.startswith("/"):
        raise BadInput(
            f"the run directory '{run_directory}' must be an absolute path below the volume that "
            f"all pods mount; name it with --run"
        )
    return folder


LAUNCHERS: dict[str, Callable[[Start], str]] = {
    "torchrun": torchrun_script,
    "slurm": slurm_script,
    "kubernetes": kubernetes_manifest,
}


def hosts_text(hosts: Sequence[tuple[str, int]]) -> str:
    """``a x 4, b x 2``.

    >>> hosts_text([("a", 4), ("b", 2)])
    'a x 4, b x 2'
    """
    return ", ".join(f"{name} x {ranks}" for name, ranks in hosts)
