"""The tensors that one rank holds, and which of them it owns."""

from collections.abc import Mapping
from zlib import crc32

import torch
from torch import nn

from penstock.capture.contract import ParameterUse
from penstock.capture.forward.stage_module import StageProgram
from penstock.capture.layer_graph import LayerGraph
from penstock.capture.record.absent import Absent
from penstock.capture.record.elsewhere import Whence
from penstock.capture.record.model_state import StatePlace
from penstock.capture.tensor_parts import plain_parts
from penstock.plan.plan import Plan
from penstock.runtime.gradients.buckets import holders_of_parameters, owners_of_parameters
from penstock.runtime.processes.world import Groups, World
from penstock.runtime.stage.parameter_shards import ParameterShards
from penstock.runtime.stage.shards import Shards, copy_values


class Holdings:
    """The tensors in ``programs``, this rank's stages, by their first names in the model.

    ``holders[name]`` are the ranks that hold a tensor. Where optimizer state is divided
    (everywhere, if ``sharded``), ``owners[name]`` is the rank that steps a parameter. In a tensor
    group ``holders`` are only ranks at the same ``place`` of their groups, which hold equal shards.
    ``holders_at[place]`` are the holders at any place, and ``shards`` says what is divided.
    ``copies`` are the holders with equal values: where a stage divides its parameters, each alone.
    """

    def __init__(
        self,
        graph: LayerGraph,
        plan: Plan,
        rank: int,
        programs: Mapping[int, StageProgram],
        shards: Shards,
        *,
        sharded: bool,
    ) -> None:
        device = plan.device_of(rank)
        self.place = plan.ranks_of(device).index(rank) if device >= 0 else 0
        places = max(len(plan.ranks_of(device)) for device in plan.devices)
        self.holders_at = [holders_of_parameters(graph, plan, place) for place in range(places)]
        self.holders = self.holders_at[self.place]
        alone = shards.dims if isinstance(shards, ParameterShards) else ()
        uses = [use for use in graph.parameter_uses if use.name not in alone]
        divided = [use for use in uses if sharded or divides_state(use, plan)]
        self.owners = owners_of_parameters(divided, self.holders)
        held = {name: own for name, own in self.holders.items() if own}
        self._firsts = {n: min(own) if n in alone else own[0] for n, own in held.items()}
        self.copies = {n: (rank,) if n in alone else own for n, own in self.holders.items()}
        self.copies_at = [
            {n: own for n, own in holders.items() if n not in alone} for holders in self.holders_at
        ]
        self._modules = [program.module for program in programs.values()]
        self._tied, self._written = graph.tied_names, graph.written_parameters
        self._rank, self._shards = rank, shards

    def whence(self, name: str) -> Whence:
        """The location of a parameter of other ranks."""
        ranks = sorted({rank for holders in self.holders_at for rank in holders[name]})
        return Whence(name, ranks, self._rank, lambda: self.named_tensors().items())

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """All parameters."""
        named = (pair for module in self._modules for pair in module.named_parameters())
        return list({self._tied.get(name, name): parameter for name, parameter in named}.items())

    def stepped_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The trained parameters that this rank's optimizer steps."""
        trained = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        return [(name, p) for name, p in trained if name not in self.owners or self.owns(name)]

    def named_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """All buffers."""
        named = (pair for module in self._modules for pair in module.named_buffers())
        return list({self._tied.get(name, name): buffer for name, buffer in named}.items())

    def changed_by_forward(self) -> dict[str, torch.Tensor]:
        """All buffers, and the parameters that forward writes to."""
        written = ((name, p) for name, p in self.named_parameters() if name in self._written)
        return dict([*self.named_buffers(), *written])

    def held_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers, including constants of the capture."""
        return dict([*self.named_parameters(), *self.named_buffers()])

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of the model that this rank holds; others may be stale here.

        A quantised weight is in its parts."""
        named = self.held_tensors().items()
        own = ((name, t) for name, t in named if self._rank in self.holders.get(name, ()))
        return {part: plain for name, t in own for part, plain in plain_parts(name, t).items()}

    def whole_name(self, name: str) -> str:
        """The name of the tensor to which a part, or optimizer state ``<name>.<key>``, belongs."""
        while name and name not in self.holders:
            name = name.rpartition(".")[0]
        return name

    def whole_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of `named_tensors`; all ranks must call this.

        Divided ones are gathered, and whole on the first rank of the tensor group.
        """
        return self._shards.whole(self.named_tensors())

    def owned_tensors(self) -> dict[str, torch.Tensor]:
        """Those of `whole_tensors` that this rank owns; all ranks must call this."""
        return {name: t for name, t in self.whole_tensors().items() if self.owns(name)}

    def owns(self, name: str) -> bool:
        """Return whether this rank owns tensor ``name``, or optimizer state ``<name>.<key>``.

        The owner is the rank that steps a parameter if its state is divided, else the first holder,
        at the first place of its tensor group, to which divided tensors are gathered.
        """
        name = self.whole_name(name)
        if not self.holders.get(name) or self.place:
            return False
        return self.owners.get(name, self._firsts[name]) == self._rank

    def share_first_values(self, groups: Groups, world: World) -> None:
        """Copy the values of each tensor from its first holder to the other holders.

        Otherwise scripts that do not seed would train replicas with different weights unnoticed.
        """
        for name, tensor in sorted(self.named_tensors().items()):
            copies = self.copies[self.whole_name(name)]
            group = groups.get(copies)
            if group is not None:
                copy_values(tensor, copies[0], group, world)


def share_attributes(graph: LayerGraph, world: World) -> None:
    """Copy rank 0's values of tensors that are attributes of modules to ranks with others.

    Those of parameters, and what forward changes, are each rank's own. All ranks must call this.
    """
    recorded = graph.recorded
    changed = {*recorded.changes, *(place for _, place in recorded.unit_changes)}
    named = graph.program.named_parameters()
    weights = {parameter.data_ptr() for _, parameter in named if type(parameter) is not Absent}
    own: dict[str, torch.Tensor] = {}
    for path, module in graph.program.named_modules():
        for key, value in vars(module).items():
            if type(value) is not torch.Tensor or value.requires_grad or value.is_meta:
                continue
            if (
                StatePlace("attribute", path, key) not in changed
                and value.data_ptr() not in weights
            ):
                own[f"{path}.{key}".removeprefix(".")] = value
    every = world.all_gather({n: (str(t.shape), digest_of(t)) for n, t in own.items()})
    for name, (shape, digest) in every[0].items():
        found = [other.get(name, ("", 0)) for other in every]
        if any(d != digest for _, d in found) and all(s == shape for s, _ in found):
            own[name].copy_(world.broadcast(own[name]))


def digest_of(tensor: torch.Tensor) -> int:
    """A number for the values of a tensor."""
    return crc32(bytes(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy()))


def divides_state(use: ParameterUse, plan: Plan) -> bool:
    """Return whether a stage that uses a parameter shards the optimizer's state."""
    return any(plan.stages[plan.stage_of_layer(n)].sharding == "optimizer" for n in use.layers)
