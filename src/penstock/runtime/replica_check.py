"""Compare the copies of each weight that several ranks hold, to notice silent data corruption.

Replicas of a stage take equal steps with equal gradients, so their weights are equal to the bit. So
are the copies of tied parameters, and of stages that a mirrored schedule holds twice. A bit that
flips in one copy makes it differ for ever. Every N steps each rank adds up the bits of its
weights, and all ranks exchange one number for each set of ranks with equal weights. Only if
these differ, they exchange one number for each tensor.

A single changed bit always shows in a sum of integers: it changes the sum by a power of two.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from penstock.capture.layer_graph import LayerGraph
from penstock.errors import ReplicasDiffer
from penstock.plan.plan import Plan
from penstock.runtime.gradients.buckets import stages_of_parameters
from penstock.runtime.holdings import Holdings
from penstock.runtime.metrics import RankNumbers
from penstock.runtime.processes.failures import Failures
from penstock.runtime.processes.world import World
from penstock.text import numbered

WORD = 8
"""Bytes that are added up at once."""


class ReplicaCheck:
    """Compares, every ``every`` steps (0: never), the weights that this rank shares with others.

    Where no weight has copies, that is never. Copies are equal only after every ``equal_every``-th
    step, and are compared then.
    """

    def __init__(
        self,
        graph: LayerGraph,
        plan: Plan,
        world: World,
        held: Holdings,
        every: int,
        equal_every: int = 1,
    ) -> None:
        self._world, self._held = world, held
        self._stages = stages_of_parameters(graph, plan)
        weights = [use.name for use in graph.parameter_uses if not use.is_buffer]
        self._names = [name for name in weights if len(held.copies[name]) > 1]
        of_all = (holders[n] for holders in held.copies_at for n in weights if n in holders)
        self._sets = sorted({ranks for ranks in of_all if len(ranks) > 1})
        self.every = every if self._sets else 0
        self._equal_every = equal_every

    def run(self, step: int, numbers: RankNumbers, failures: Failures) -> None:
        """Compare if it is time to, before the weights change in step ``step``.

        All ranks must call this.
        """
        # They were equal before, and some multiple of the interval has come since.
        since = step - self._equal_every
        if (step - 1) % self._equal_every or step // self.every == since // self.every:
            return
        own = self._sums()
        digests = [
            digest_of_sums(s for name, s in own if self._held.copies[name] == h) for h in self._sets
        ]
        with failures.shared():
            rows = numbers.exchange(digests, "the checksums of weights")
        for place, holders in enumerate(self._sets):
            if len({rows[rank][place] for rank in holders}) > 1:
                raise ReplicasDiffer(self._difference(step, holders, dict(own)))

    @torch.no_grad()
    def _sums(self) -> list[tuple[str, int]]:
        """The sums of this rank's shared weights, by name, in the order of the model."""
        parameters = dict(self._held.named_parameters())
        names = [name for name in self._names if name in parameters]
        sums = [bit_sum(parameters[name].detach()) for name in names]
        return list(zip(names, torch.stack(sums).tolist(), strict=True)) if sums else []

    def _difference(self, step: int, holders: Sequence[int], own: dict[str, int]) -> str:
        """The error message; all ranks must call this."""
        of_ranks = self._world.all_gather(own)
        # Another place of the tensor group holds other shards, but all ranks name the same weight.
        shared = [n for h in self._held.copies_at for n, r in h.items() if r == tuple(holders)]
        known = of_ranks[holders[0]]
        name = next(
            n for n in shared if n in known and len({of_ranks[rank][n] for rank in holders}) > 1
        )
        sums = {rank: of_ranks[rank][name] for rank in holders}
        stages = numbered("stage", self._stages[name])
        most, odd = apart(sums)
        who = f"that of {numbered('rank', odd)} is not that of {numbered('rank', most)}"
        if len(most) <= len(odd):
            who = f"{numbered('rank', list(holders))} disagree, and no majority shows who is right"
        return (
            f"the copies of weight '{name}' ({stages}) differ before step {step}: {who}; a device "
            f"or its memory may be failing, so look at it, and resume from a checkpoint of at most "
            f"step {step - self.every}, when the copies were equal"
        )


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's bits as integers, modulo 2^64; it takes one pass over the memory."""
    flat = tensor.contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % WORD:
        flat = flat.clone()
    data = flat.view(torch.uint8)
    whole = data.numel() // WORD * WORD
    return data[:whole].view(torch.int64).sum() + data[whole:].sum(dtype=torch.int64)


def digest_of_sums(sums: Iterable[int]) -> float:
    """A number of 48 bits that differs between different lists of sums."""
    content = ",".join(map(str, sums)).encode()
    return float(int.from_bytes(hashlib.sha256(content).digest()[:6]))


def apart(sums: dict[int, int]) -> tuple[list[int], list[int]]:
    """The ranks with the most frequent sum, and the others.

    >>> apart({1: 7, 4: 7, 5: 8})
    ([1, 4], [5])
    """
    most, _ = Counter(sums.values()).most_common(1)[0]
    return [r for r, s in sums.items() if s == most], [r for r, s in sums.items() if s != most]
