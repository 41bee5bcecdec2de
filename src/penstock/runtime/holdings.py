"""The tensors that one rank holds, and which of them it owns."""

from collections.abc import Mapping

import torch
from torch import nn

from penstock.capture.layer_graph import LayerGraph
from penstock.capture.stage_program import StageProgram
from penstock.plan.plan import Plan
from penstock.runtime.gradients.buckets import holders_of_parameters
from penstock.runtime.gradients.sharding import owners_of_parameters
from penstock.runtime.processes.world import Groups, World
from penstock.runtime.stages.tensor_shards import TensorShards, copy_values

__all__ = ["Holdings"]


class Holdings:
    """The tensors in ``programs``, this rank's stages, by their first names in the model.

    ``holders[name]`` are the ranks that hold a tensor. With ``sharded`` optimizer state
    ``owners[name]`` is the rank that steps a parameter; otherwise ``owners`` is empty. In a tensor
    group ``holders`` are only ranks at the same ``place`` of their groups, which hold equal shards.
    ``holders_at[place]`` are the holders at any place, and ``shards`` says what is divided.
    """

    def __init__(
        self,
        graph: LayerGraph,
        plan: Plan,
        rank: int,
        programs: Mapping[int, StageProgram],
        shards: TensorShards,
        *,
        sharded: bool,
    ) -> None:
        device = plan.device_of(rank)
        self.place = plan.ranks_of(device).index(rank) if device >= 0 else 0
        places = max(len(plan.ranks_of(device)) for device in plan.devices)
        self.holders_at = [holders_of_parameters(graph, plan, place) for place in range(places)]
        self.holders = self.holders_at[self.place]
        self.owners: Mapping[str, int] = {}
        if sharded:
            self.owners = owners_of_parameters(graph.parameter_uses, self.holders)
        self._modules = [program.module for program in programs.values()]
        self._tied = graph.tied_names
        self._rank, self._shards = rank, shards

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """All parameters."""
        named = (pair for module in self._modules for pair in module.named_parameters())
        return list({self._tied.get(name, name): parameter for name, parameter in named}.items())

    def stepped_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The trained parameters that this rank's optimizer steps."""
        trained = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        return [(name, p) for name, p in trained if not self.owners or self.owns(name)]

    def named_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """All buffers."""
        named = (pair for module in self._modules for pair in module.named_buffers())
        return list({self._tied.get(name, name): buffer for name, buffer in named}.items())

    def held_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers, including constants of the capture."""
        return dict([*self.named_parameters(), *self.named_buffers()])

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers that belong to the model."""
        return {name: t for name, t in self.held_tensors().items() if name in self.holders}

    def whole_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of `named_tensors`; all ranks must call this.

        Divided ones are gathered, and whole on the first rank of the tensor group.
        """
        return self._shards.whole(self.named_tensors())

    def owned_tensors(self) -> dict[str, torch.Tensor]:
        """Those of `whole_tensors` that this rank owns; all ranks must call this."""
        return {name: t for name, t in self.whole_tensors().items() if self.owns(name)}

    def owns(self, name: str) -> bool:
        """Whether this rank owns the tensor ``name``, or the optimizer state ``<name>.<key>``.

        The owner is the rank that steps a parameter if that is sharded, else the first holder, at
        the first place of its tensor group.
        """
        if name not in self.holders:
            name = name.rpartition(".")[0]
        holders = self.holders.get(name)
        if not holders or self.place:
            return False
        return self.owners.get(name, holders[0]) == self._rank

    def share_first_values(self, groups: Groups, world: World) -> None:
        """Copy the values of each tensor from its first holder to the other holders.

        Otherwise scripts that do not seed would train replicas with different weights unnoticed.
        """
        for name, tensor in sorted(self.named_tensors().items()):
            group = groups.get(self.holders[name])
            if group is not None:
                copy_values(tensor, self.holders[name][0], group, world)
