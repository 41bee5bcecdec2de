"""The fastest pipeline of a problem by a constraint program: cuts, devices, depths and recompute.

Nothing here is the search's, the planners' or the simulator's: a plan is played by inequalities,
and CP-SAT proves that no other is faster. It is about problems on which that is exact:

- micro-batches of one row, so that no stage is replicated;
- tensors between neighbouring layers that go down only (gradients without bytes), so that every
  link carries its messages one after the other in the order of the micro-batches;
- no parameters, hence no all-reduce and no optimizer step;
- figures that are whole numbers on every device.

Stages run forwards and whole backwards in the order of micro-batches, ``d`` forwards ahead; depths
do not grow from one stage to the next. That is every order of '1f1b', 'early-backward' with any
limits, and 'gpipe'.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from ortools.sat.python import cp_model

from penstock.plan.problem import PlanningProblem


@dataclass(frozen=True)
class Optimum:
    """The least seconds, and stages that take them, with the forwards that each runs ahead."""

    seconds: int
    stages: tuple["Choice", ...]
    depths: tuple[int, ...]


@dataclass(frozen=True)
class Choice:
    """A stage of some layers on a device, and what it costs there."""

    layers: range
    device: int
    recompute: bool
    forward_s: int
    backward_s: int
    again_s: int
    first_bytes: int
    further_bytes: int
    memory_bytes: int


def whole(figure: float) -> int:
    """A figure that must be a whole number."""
    assert figure == int(figure), figure
    return int(figure)


def choices_of(problem: PlanningProblem) -> list[Choice]:
    """Every stage that there could be."""
    profile, found = problem.profile, list[Choice]()
    cuts = range(len(profile.layers) + 1)
    again = {"auto": (False, True), "on": (True,), "off": (False,)}[problem.recompute]
    runs = [(lo, hi) for lo, hi in product(cuts, cuts) if lo < hi]
    devices = list(enumerate(problem.cluster.devices))
    for (lo, hi), (number, device), recompute in product(runs, devices, again):
        layers = [profile.layers[i] for i in range(lo, hi)]
        saved = sum(layer.saved_bytes.at(1) for layer in layers)
        inputs = sum(edge.bytes.at(1) for edge in profile.edges if edge.consumer == lo)
        forward_s = sum(layer.forward_s.at(1) for layer in layers) / device.speed
        backward_s = sum(
            layer.backward_input_s.at(1) + layer.backward_weight_s.at(1) for layer in layers
        )
        found.append(
            Choice(
                range(lo, hi),
                number,
                recompute,
                whole(forward_s),
                whole(backward_s / device.speed),
                whole(forward_s) if recompute else 0,
                whole(max(saved, inputs) if recompute else saved),
                whole(inputs if recompute else saved),
                whole(device.memory_bytes),
            )
        )
    return found


def best_pipeline(problem: PlanningProblem, seconds: float = 600.0) -> Optimum | None:
    """The optimum over all numbers of stages; None where nothing fits.

    ``seconds`` are for each number of stages. Proofs take some seconds, on a busy machine minutes.

    Raises:
        AssertionError: the optimum was not proven in time.
    """
    choices, best = choices_of(problem), None
    most = min(len(problem.profile.layers), len(problem.cluster.devices))
    for stages in range(1, most + 1):
        found = Model(problem, choices, stages).solved(best.seconds if best else None, seconds)
        best = found or best
    return best


class Model:
    """The program for one number of stages."""

    def __init__(self, problem: PlanningProblem, choices: list[Choice], stages: int) -> None:
        self.problem, self.choices, self.stages = problem, choices, stages
        self.batches = problem.global_batch // problem.micro_batch_sizes[0]
        slowest = [max(c.forward_s for c in choices), max(c.backward_s for c in choices)]
        self.horizon = 10 * self.batches * (2 * slowest[0] + slowest[1]) * stages
        self.model = cp_model.CpModel()
        self.chosen = [
            [self.model.new_bool_var(f"{s} {i}") for i in range(len(choices))]
            for s in range(stages)
        ]
        self.depth = [self.model.new_int_var(1, self.batches, f"depth {s}") for s in range(stages)]
        self.cut_the_chain()
        self.keep_to_memory()
        self.play()

    def total(self, stage: int, figure: str) -> cp_model.LinearExprT:
        """A figure of the choice that a stage makes."""
        pairs = zip(self.chosen[stage], self.choices, strict=True)
        return sum(chosen * getattr(choice, figure) for chosen, choice in pairs)

    def those(self, stage: int, wanted: Callable[[Choice], bool]) -> list[cp_model.IntVar]:
        """The variables of a stage's choices of some kind."""
        pairs = zip(self.chosen[stage], self.choices, strict=True)
        return [chosen for chosen, choice in pairs if wanted(choice)]

    def cut_the_chain(self) -> None:
        """One choice a stage, layers in order, every device once at most."""
        model, last = self.model, len(self.problem.profile.layers)
        for s, row in enumerate(self.chosen):
            model.add_exactly_one(row)
            for chosen, choice in zip(row, self.choices, strict=True):
                starts_where_it_must = choice.layers.start == 0 if s == 0 else True
                ends_where_it_must = choice.layers.stop == last if s == self.stages - 1 else True
                if not (starts_where_it_must and ends_where_it_must):
                    model.add(chosen == 0)
        for s, cut in product(range(self.stages - 1), range(1, last)):
            ends = self.those(s, lambda choice, cut=cut: choice.layers.stop == cut)
            starts = self.those(s + 1, lambda choice, cut=cut: choice.layers.start == cut)
            model.add(sum(ends) == sum(starts))
        for device in range(len(self.problem.cluster.devices)):
            model.add_at_most_one(
                x
                for row in self.chosen
                for x, choice in zip(row, self.choices, strict=True)
                if choice.device == device
            )

    def keep_to_memory(self) -> None:
        """Depths do not grow, and what they keep fits."""
        model = self.model
        for s in range(self.stages - 1):
            model.add(self.depth[s + 1] <= self.depth[s])
        self.deeper = [
            [model.new_bool_var(f"deeper {s} {k}") for k in range(self.batches)]
            for s in range(self.stages)
        ]
        for s, k in product(range(self.stages), range(self.batches)):
            model.add(self.depth[s] >= k + 1).only_enforce_if(self.deeper[s][k])
            model.add(self.depth[s] <= k).only_enforce_if(self.deeper[s][k].negated())
        for s, row in enumerate(self.chosen):
            for chosen, choice in zip(row, self.choices, strict=True):
                left = choice.memory_bytes - choice.first_bytes
                if left < 0:
                    model.add(chosen == 0)
                elif choice.further_bytes:
                    model.add(self.depth[s] - 1 <= left // choice.further_bytes).only_enforce_if(
                        chosen
                    )
                if choice.recompute:
                    # A single micro-batch in flight keeps everything.
                    model.add(self.depth[s] >= 2).only_enforce_if(chosen)

    def play(self) -> None:
        """When every pass and message starts, and the end of the last."""
        model, stages, batches = self.model, self.stages, self.batches
        self.end = model.new_int_var(0, self.horizon, "end")

        def times(name: str) -> list[list[cp_model.IntVar]]:
            return [
                [model.new_int_var(0, self.horizon, f"{name} {s} {m}") for m in range(batches)]
                for s in range(stages)
            ]

        forward, backward, message = times("F"), times("B"), times("message")
        again = times("R")
        for s in range(stages):
            forward_s = self.total(s, "forward_s")
            backward_s = self.total(s, "backward_s")
            self.in_order(s, forward[s], again[s], [b + backward_s for b in backward[s]])
            for m in range(batches):
                model.add(forward[s][m] + forward_s <= message[s][m])
                # What is computed again need not wait for the gradient.
                model.add(again[s][m] + self.total(s, "again_s") <= backward[s][m])
                model.add(backward[s][m] + backward_s <= self.end)
                if s:
                    model.add(backward[s][m] + backward_s <= backward[s - 1][m])
            if s + 1 < stages:
                moved_s = self.moved_s(s)
                for m in range(batches):
                    model.add(message[s][m] + moved_s <= forward[s + 1][m])
                for m in range(batches - 1):
                    model.add(message[s][m] + moved_s <= message[s][m + 1])
            else:
                for m in range(batches):
                    model.add(message[s][m] <= backward[s][m])
        model.minimize(self.end)

    def in_order(
        self,
        stage: int,
        forward: list[cp_model.IntVar],
        again: list[cp_model.IntVar],
        ends: list[cp_model.LinearExprT],
    ) -> None:
        """The order of one stage: forward ``m`` goes before backward ``j`` if ``m < j + depth``.

        A backward begins with what is computed ``again``, and ``ends``.
        """
        model, forward_s = self.model, self.total(stage, "forward_s")
        for m in range(self.batches - 1):
            model.add(forward[m] + forward_s <= forward[m + 1])
            model.add(ends[m] <= again[m + 1])
        for m, j in product(range(self.batches), repeat=2):
            if m <= j:
                model.add(forward[m] + forward_s <= again[j])
            else:
                ahead = self.deeper[stage][m - j]
                model.add(forward[m] + forward_s <= again[j]).only_enforce_if(ahead)
                model.add(ends[j] <= forward[m]).only_enforce_if(ahead.negated())

    def moved_s(self, stage: int) -> cp_model.IntVar:
        """Seconds of a message to the next stage, between the devices that the two are on."""
        model, cluster = self.model, self.problem.cluster
        seconds = model.new_int_var(0, self.horizon, f"moved {stage}")
        sizes = {
            edge.consumer: whole(edge.bytes.at(1))
            for edge in self.problem.profile.edges
            if edge.consumer == edge.producer + 1
        }
        devices = range(len(cluster.devices))
        on = {
            (at, device): model.new_bool_var(f"{at} on {device}")
            for at, device in product((stage, stage + 1), devices)
        }
        for (at, device), here in on.items():
            there = self.those(at, lambda choice, device=device: choice.device == device)
            model.add(sum(there) == here)
        for cut in range(1, len(self.problem.profile.layers)):
            ends = self.those(stage, lambda choice, cut=cut: choice.layers.stop == cut)
            ends_here = model.new_bool_var(f"{stage} ends at {cut}")
            model.add(sum(ends) == ends_here)
            for i, j in product(devices, devices):
                if i != j:
                    exact = cluster.latency(i, j) + sizes.get(cut, 0) / cluster.bandwidth(i, j)
                    taken = whole(exact) if sizes.get(cut, 0) else 0
                    model.add(seconds == taken).only_enforce_if(
                        ends_here, on[stage, i], on[stage + 1, j]
                    )
        return seconds

    def solved(self, better_than: int | None, seconds: float) -> Optimum | None:
        """The optimum if it is less than ``better_than``; None where there is none."""
        if better_than is not None:
            self.model.add(self.end <= better_than - 1)
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.num_workers = 2
        solver.parameters.random_seed = 1
        status = solver.solve(self.model)
        if status == cp_model.INFEASIBLE:
            return None
        assert status == cp_model.OPTIMAL, solver.status_name(status)
        stages = [
            choice
            for row in self.chosen
            for chosen, choice in zip(row, self.choices, strict=True)
            if solver.value(chosen)
        ]
        depths = tuple(solver.value(depth) for depth in self.depth)
        return Optimum(solver.value(self.end), tuple(stages), depths)
