"""Kinds of batches that one pipeline trains on: each has a graph, and stages of this rank."""

from collections.abc import Collection, Iterator, Sequence

from penstock.capture.contract import Batch
from penstock.capture.forward.stage_module import StageProgram
from penstock.capture.kinds import kind_of
from penstock.capture.layer_graph import LayerGraph
from penstock.errors import BadInput
from penstock.runtime.program import RankStages
from penstock.runtime.stage.runner import ModuleRunner


class BatchKinds:
    """The graphs of all kinds of batches, and ``graph``, which runs, that of kind ``number``.

    ``paths`` are also those of evaluation mode, which run while the model does not train.
    """

    def __init__(self, graph: LayerGraph) -> None:
        self.graphs, self.graph, self.number, self.trains = graph.kinds, graph, 0, True
        own = (kind.in_evaluation for kind in self.graphs)
        self.paths = [*self.graphs, *filter(None, own)]
        self._stages: list[RankStages[ModuleRunner]] = []

    @property
    def stages(self) -> RankStages[ModuleRunner]:
        """The stages of the graph that runs."""
        return next(s for p, s in zip(self.paths, self._stages, strict=True) if p is self.graph)

    def give_stages(self, stages: Sequence[RankStages[ModuleRunner]]) -> None:
        """Give each path its stages."""
        self._stages = list(stages)

    def programs(self) -> Iterator[Collection[StageProgram]]:
        """The programs of this rank's stages, path after path."""
        yield from (stages.programs.values() for stages in self._stages)

    def take(self, number: int) -> None:
        """Continue with a kind of batches; unless the model trains, as in evaluation mode."""
        own = self._of_mode(number)
        starts = self.graph.state.starts_training
        self.number, self.graph = number, own
        if not self.trains:
            own.set_training(False)
        # Once, for all kinds: the mode is the user's to set.
        own.state.starts_training &= starts

    def _of_mode(self, number: int) -> LayerGraph:
        own = self.graphs[number]
        return (None if self.trains else own.in_evaluation) or own

    def find(self, batches: Sequence[Batch], graph: LayerGraph | None) -> int:
        """The kind of the batches of one step; BadInput if they are of none, or of several.

        ``graph`` is one whose outputs alone are wanted.
        """
        of = graph or self.graphs[0]
        found = {kind_of(of, batch, for_outputs=graph is not None) for batch in batches}
        if len(found) > 1:
            raise BadInput(
                f"the {len(batches)} batches of one step are of {len(found)} kinds, and must be "
                f"of one; take a step with those of each kind"
            )
        return found.pop()

    def by_path(self, number: int, batches: Sequence[Batch]) -> int:
        """Of the kinds for batches like those of a kind: that whose path of the loss fits.

        It is the first whose path the batches take, as far as they show it, or else the latest.
        """
        program = self.graphs[number].program
        fitting = [n for n, other in enumerate(self.graphs) if other.program is program]
        if len(fitting) == 1 or not batches:
            return number
        fitting.sort(key=lambda n: n != self.number)
        return next((n for n in fitting if self.follows_path(n, batches)), fitting[0])

    def follows_path(self, number: int, batches: Sequence[Batch]) -> bool:
        """Return whether the loss takes the path of a kind, in the mode of the next run."""
        graph = self._of_mode(number)
        if self.trains:
            return all(map(graph.follows_path, batches))
        graph.set_training(False)
        try:
            return all(map(graph.follows_path, batches))
        finally:
            graph.set_training(True)
