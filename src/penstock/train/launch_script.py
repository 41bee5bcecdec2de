"""Write the script that starts a job on several hosts, by torchrun or Slurm.

Ranks are numbered host by host, in the order of the cluster, for so a plan numbers its devices.
"""

import shlex
from dataclasses import dataclass

PORT = 29_500
SAVES_WITHIN_S = 120
"""Seconds before the end at which Slurm sends SIGTERM; a run then ends its step and saves."""


@dataclass(frozen=True)
class Start:
    """A job to start: the arguments of ``penstock train``, and the ranks of each host by its name.

    ``run_directory`` is on a disk of all hosts.
    """

    name: str
    arguments: tuple[str, ...]
    run_directory: str
    hosts: tuple[tuple[str, int], ...]
    on_gpus: bool = False

    @property
    def ranks(self) -> int:
        return sum(ranks for _, ranks in self.hosts)

    @property
    def command(self) -> str:
        """The command of a rank. A run that has been planned before is resumed."""
        return f"penstock train {shlex.join(self.arguments)} $resume"

    @property
    def setting(self) -> str:
        """Lines of shell that set the ``ranks`` of hosts, and ``resume`` for `command`."""
        counts = " ".join(str(ranks) for _, ranks in self.hosts)
        place = shlex.quote(f"{self.run_directory}/plan.json")
        return f"""ranks=({counts})
resume=""; [ -e {place} ] && resume="--resume"
# More threads than one would be set by the user, who knows the cores.
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-1}}\""""


def torchrun_script(start: Start) -> str:
    """A script to run on every host, with the host's number."""
    names = [name for name, _ in start.hosts]
    numbers = ", ".join(f"{number} on {name}" for number, name in enumerate(names))
    return f"""#!/bin/bash
# Starts job '{start.name}' on {len(names)} host(s). Run it on each of them,
# with its number: {numbers}
set -euo pipefail
node="${{1:?give the number of this host, from 0}}"
{start.setting}
exec torchrun --nnodes={len(names)} --node-rank="$node" \\
    --nproc-per-node="${{ranks[$node]}}" \\
    --master-addr="${{MASTER_ADDR:-{names[0]}}}" \\
    --master-port="${{MASTER_PORT:-{PORT}}}" --no-python \\
    {start.command}
"""


def slurm_script(start: Start) -> str:
    """A script for sbatch. Slurm may choose the nodes; each gets the ranks of a host."""
    most = max(ranks for _, ranks in start.hosts)
    gpus = f"#SBATCH --gpus-per-node={most}\n" if start.on_gpus else ""
    return f"""#!/bin/bash
#SBATCH --job-name=penstock-{start.name}
#SBATCH --nodes={len(start.hosts)}
#SBATCH --ntasks={start.ranks}
{gpus}#SBATCH --requeue
#SBATCH --signal=TERM@{SAVES_WITHIN_S}
# A host of the plan is a node of the job, in the order of both.
set -euo pipefail
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
{start.setting}
if [ "${{#nodes[@]}}" -lt "${{#ranks[@]}}" ]; then
    echo "the job got ${{#nodes[@]}} node(s), and its plan is for ${{#ranks[@]}}" >&2
    exit 2
fi
export SLURM_HOSTFILE="$SLURM_SUBMIT_DIR/.penstock-hosts-$SLURM_JOB_ID"
trap 'rm -f "$SLURM_HOSTFILE"' EXIT
for host in "${{!ranks[@]}}"; do
    for _ in $(seq "${{ranks[$host]}}"); do echo "${{nodes[$host]}}"; done
done > "$SLURM_HOSTFILE"
srun --distribution=arbitrary --ntasks={start.ranks} --kill-on-bad-exit \\
    {start.command}
"""
