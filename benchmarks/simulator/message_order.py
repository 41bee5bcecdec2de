"""What the planned order of messages would change in predictions, for the plans of rehearsals.

    python benchmarks/simulator/message_order.py

The simulator starts the message that was ready first. Beside it here: the one that is planned first
(`penstock.schedule.message_order`); and all messages of a device one after another in the planned
order, as with one communicator of NCCL.
"""

import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks" / "rehearsal")]

import rehearse  # noqa: E402
from reference import plain_simulator  # noqa: E402
from reference.plain_workload import PlainWorkload  # noqa: E402

from penstock.cluster.toml_file import find_cluster  # noqa: E402
from penstock.plan.ordering import order_of  # noqa: E402
from penstock.profile.find import find_profile  # noqa: E402
from penstock.schedule.action import Action  # noqa: E402
from penstock.schedule.message_order import in_planned_order, unit_times  # noqa: E402
from penstock.schedule.shape import PipelineShape  # noqa: E402
from penstock.simulate.catalogue import workload_of  # noqa: E402

MOST_RANKS = 16

Item = tuple[int, int]
"""A message of the workload, and a micro-batch."""


class PlannedPlay(plain_simulator.Play):
    """The plain simulator, in which waiting messages go in the planned order.

    With ``one_stream`` a message also waits for all earlier ones of its sender and its receiver.
    """

    def __init__(self, workload: PlainWorkload, shape: PipelineShape, *, one_stream: bool) -> None:
        super().__init__(workload)
        self.one_stream = one_stream
        times = unit_times([list(order) for order in workload.schedule.orders], shape)
        sent: list[tuple[Action, int, Item]] = []
        for action in times:
            direction = "F" if action.kind == "F" else "B"
            for index, message in enumerate(workload.messages):
                sender = workload.replicas[message.sender]
                if (
                    action.kind in "FBI"
                    and message.direction == direction
                    and sender.instance == workload.instances.of(action)
                ):
                    device = workload.devices[sender.position].device
                    sent.append((action, device, (index, action.micro_batch)))
        planned = in_planned_order(sent, times)
        self.places = {item: place for place, item in enumerate(planned)}
        self.queues: dict[int, list[Item]] = {}
        for item in planned:
            if workload.messages[item[0]].seconds > 0:
                for position in self.ends_of(item[0]):
                    self.queues.setdefault(position, []).append(item)

    def ends_of(self, index: int) -> tuple[int, int]:
        """The devices between which a message goes."""
        message, replicas = self.workload.messages[index], self.workload.replicas
        return replicas[message.sender].position, replicas[message.receiver].position

    def offer(self, index: int, item: int) -> None:
        """See `plain_simulator.Play`; the age of a message is its place in the planned order."""
        if index < self.first_reduction:
            self.sequence = self.places[index, item]
        super().offer(index, item)

    def can_start(self, index: int) -> bool:
        """See `plain_simulator.Play`."""
        waiting = self.lanes[index].waiting
        if index >= self.first_reduction or not self.one_stream or not waiting:
            return super().can_start(index)
        first = index, waiting[0][1]
        alone = all(self.queues[position][0] == first for position in self.ends_of(index))
        return alone and super().can_start(index)

    def end_transfer(self, index: int) -> None:
        """See `plain_simulator.Play`."""
        if index < self.first_reduction and self.one_stream:
            for position in self.ends_of(index):
                self.queues[position].pop(0)
        super().end_transfer(index)
        if self.one_stream:
            self.start_waiting(list(range(self.first_reduction)))


def main() -> None:
    """Play all plans in three ways, and print by how much the iteration differs."""
    found: dict[str, list[float]] = {"planned first": [], "one stream": []}
    for case in rehearse.cases():
        if case.ranks > MOST_RANKS:
            continue
        profile, cluster = find_profile(case.model), find_cluster(case.cluster)
        plan = rehearse.plan_of(case, profile)
        workload = PlainWorkload.of(workload_of(plan, profile, cluster, order_of(plan)))
        usual_s = plain_simulator.play(workload).iteration_s
        for what, errors in found.items():
            play = PlannedPlay(workload, plan.shape(), one_stream=what == "one stream")
            errors.append(play.run().iteration_s / usual_s - 1)
        last = ", ".join(f"{what} {errors[-1]:+.1%}" for what, errors in found.items())
        print(f"{case.model} on {case.cluster}, {case.ranks} ranks, {case.schedule}: {last}")
    for what, errors in found.items():
        moved = sum(abs(error) > 1e-9 for error in errors)
        print(
            f"{what}: {moved} of {len(errors)} plans move, median {median(errors):+.1%}, from "
            f"{min(errors):+.1%} to {max(errors):+.1%}"
        )


if __name__ == "__main__":
    main()
