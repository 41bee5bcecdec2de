"""DAPPLE's comparison with PipeDream's plans, by the scorer of its released planner.

The fixed plans of the authors' example program on two servers of eight V100s (config A) are scored
with the authors' constants by their recursive rules, restated here from the description. Two
conventions differ in the released code: whether neighbouring stages share their boundary layer,
which is then counted in both.

BERT-large is not among the built-in models. Its published profile, with 24 layers, has per sample
the figures of BERT-48's layers. So it is BERT-48 without half of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from reproduction.published import MODELS

from penstock.cluster.toml_file import find_cluster
from penstock.plan.cost import crossing_bytes, rows_by_speed
from penstock.plan.plan import Plan, Stage
from penstock.profile.model_profile import LayerCost, ModelProfile
from penstock.simulate.simulation import simulate_plan

NVLINK_BYTES_PER_S, COLLECTIVE_BYTES_PER_S, POINT_TO_POINT_BYTES_PER_S = 25e9, 3.0e9, 1.0e9
DEVICES_PER_SERVER = 8

SCHEDULES = ("1f1b", "early-backward")
"""The paper's policies P_A and P_B; the faster one counts for each plan."""

__all__ = ["RATIOS", "plan_ratio", "simulated_ratio"]


@dataclass(frozen=True)
class Layer:
    """Seconds of forward and backward, bytes that leave the prefix ending here, parameters."""

    seconds: float
    activation_bytes: float
    parameter_bytes: int


@dataclass(frozen=True)
class FixedStage:
    """Layers ``start`` to ``stop`` (exclusive, without the input) on devices."""

    start: int
    stop: int
    devices: range


def stages(*stops_and_counts: tuple[int, int]) -> list[FixedStage]:
    """Stages by their ends and numbers of devices, on consecutive devices."""
    made: list[FixedStage] = []
    start = device = 0
    for stop, count in stops_and_counts:
        made.append(FixedStage(start, stop, range(device, device + count)))
        start, device = stop, device + count
    return made


# PipeDream's plan for VGG-19 has its third stage from layer 17 on: the example program lets it
# overlap the second one, an obvious slip. AmoebaNet's is straight, XLNet's nearly so.
AMOEBA_CUTS = (5, 8, 11, 14, 17, 19, 22, 25, 27, 29, 31, 33, 35, 37, 39, 43)
XLNET_CUTS = (6, 8, 11, 14, 17, 20, 23, 26, 29, 31, 33, 35, 37, 41)
PLANS = {
    "vgg-19": (stages((17, 14), (25, 2)), stages((11, 8), (17, 6), (19, 1), (25, 1))),
    "amoeba-36": (stages((31, 8), (43, 8)), stages(*((cut, 1) for cut in AMOEBA_CUTS))),
    "bert-large": (
        stages((14, 8), (27, 8)),
        stages((4, 2), (13, 6), (16, 2), (19, 2), (22, 2), (27, 2)),
    ),
    "xlnet-36": (
        stages((23, 8), (41, 8)),
        stages(*((cut, 2 if cut in (29, 41) else 1) for cut in XLNET_CUTS)),
    ),
}
BATCHES = {
    "vgg-19": (1024, 32),
    "amoeba-36": (128, 1),
    "bert-large": (128, 2),
    "xlnet-36": (128, 1),
}
RATIOS = {
    "vgg-19": (3.0, 3.1),
    "amoeba-36": (1.8, 1.9),
    "bert-large": (1.26, 1.88),
    "xlnet-36": (1.3, 1.7),
}
"""Published: the least and the most, by convention."""

LAYERS_OF_BERT_LARGE = 24


def chain_of(profile: ModelProfile) -> list[Layer]:
    """The states of the linearised graph: no input, and one state for XLNet's two free branches."""
    found: list[Layer] = []
    for index, layer in enumerate(profile.layers):
        if is_input(layer):
            continue
        samples = profile.batch_size
        crossing = crossing_bytes(profile, index + 1, lambda edge: edge.bytes)
        found.append(
            Layer(
                layer.forward_s.at(samples) + layer.backward_s.at(samples),
                crossing.at(samples),
                layer.parameter_bytes,
            )
        )
    return found


def is_input(layer: LayerCost) -> bool:
    """Whether a layer is no state of the linearised graph."""
    return "input" in layer.name or "one-hot" in layer.name


def layers_of(model: str) -> list[Layer]:
    """The chain of a model of `PLANS`."""
    if model != "bert-large":
        return chain_of(MODELS[model].profile())
    _, _, *layers, pooler = chain_of(MODELS["bert-48"].profile())
    before = len(layers) - 48
    return [*layers[: before + LAYERS_OF_BERT_LARGE], pooler]


def servers(devices: Sequence[int]) -> set[int]:
    return {device // DEVICES_PER_SERVER for device in devices}


def moved_s(size_bytes: float, senders: range, receivers: range) -> float:
    """Split and concat by the released code."""
    if len(servers(receivers)) > 1:
        apart = len(servers([*senders, *receivers])) > 1
        return size_bytes / (COLLECTIVE_BYTES_PER_S if apart else NVLINK_BYTES_PER_S)
    (home,) = servers(receivers)
    away = sum(device // DEVICES_PER_SERVER != home for device in senders)
    if away:
        return size_bytes * away / len(senders) / POINT_TO_POINT_BYTES_PER_S
    return size_bytes / NVLINK_BYTES_PER_S


def reduced_s(size_bytes: float, devices: range) -> float:
    """A ring; inside a server half as many rings in parallel as there are devices."""
    count = len(devices)
    if count == 1:
        return 0.0
    ring_bytes = 2 * (count - 1) / count * size_bytes
    if len(servers(devices)) == 1:
        return ring_bytes / NVLINK_BYTES_PER_S / (count // 2)
    return ring_bytes / COLLECTIVE_BYTES_PER_S


def speed_up(
    chain: list[Layer], plan: list[FixedStage], batches: float, micro_batches: int, shared: bool
) -> float:
    """Over one device, of an iteration of ``batches`` profiled batches."""
    scale = batches / micro_batches
    seconds, reduces = [], []
    for index, stage in enumerate(plan):
        if index:
            moved = chain[stage.start - 1].activation_bytes * scale
            seconds.append(moved_s(moved, plan[index - 1].devices, stage.devices))
            reduces.append(0.0)
        stop = stage.stop + (shared and index + 1 < len(plan))
        layers = chain[stage.start : stop]
        # Forward and backward count half of the layer's time each.
        seconds.append(sum(layer.seconds for layer in layers) * scale / len(stage.devices) / 2)
        reduces.append(reduced_s(sum(layer.parameter_bytes for layer in layers), stage.devices))
    return (
        batches
        * sum(layer.seconds for layer in chain)
        / recursive_s(seconds, reduces, micro_batches)
    )


def recursive_s(seconds: list[float], reduces: list[float], micro_batches: int) -> float:
    """The authors' rules: transfers are stages, each ``x`` with ``len - x`` forwards ahead.

    start F(i, x) = max(end B(i - len + x, x), end F(i - 1, x), end F(i, x - 1))
    start B(i, x) = max(end B(i, x + 1), end F(i + len - x - 1, x))
    """
    count = len(seconds)
    forward: dict[tuple[int, int], float] = {}
    backward: dict[tuple[int, int], float] = {}

    def end_forward(i: int, x: int) -> float:
        """Of what has not been there before the first and after the last, nothing is waited for."""
        if not (0 <= i < micro_batches and 0 <= x < count):
            return 0.0
        if (i, x) not in forward:
            own = max(end_forward(i - 1, x), end_forward(i, x - 1))
            forward[i, x] = seconds[x] + max(own, end_backward(i - count + x, x))
        return forward[i, x]

    def end_backward(i: int, x: int) -> float:
        if not (0 <= i < micro_batches and 0 <= x < count):
            return 0.0
        if (i, x) not in backward:
            ahead = end_forward(i + count - x - 1, x)
            backward[i, x] = seconds[x] + max(end_backward(i, x + 1), ahead)
        return backward[i, x]

    for i in range(micro_batches):
        # In this order no call goes deeper than a few stages.
        for x in range(count):
            end_forward(i, x)
    return max(end_backward(micro_batches - 1, x) + reduces[x] for x in range(count))


def plan_ratio(
    model: str, shared: bool, global_batch: int | None = None, micro_batch: int | None = None
) -> float:
    """DAPPLE's fixed plan over PipeDream's, in speed; by default with the batches of `BATCHES`."""
    chain = layers_of(model)
    global_batch, micro_batch = global_batch or BATCHES[model][0], micro_batch or BATCHES[model][1]
    published = MODELS.get(model, MODELS["bert-48"])
    batches, micro_batches = global_batch / published.profile_batch, global_batch // micro_batch
    dapple, pipedream = (
        speed_up(chain, plan, batches, micro_batches, shared) for plan in PLANS[model]
    )
    return dapple / pipedream


def simulated_ratio(
    model: str, global_batch: int, micro_batch: int, slow_messages: bool = False
) -> float:
    """The same by our simulator on our preset of config A, or with the scorer's slow messages.

    Inputs are on the stage of the layer after them. BERT-large is no built-in model.
    """
    profile, cluster = MODELS[model].profile(), find_cluster("dapple-a")
    if slow_messages:
        ports = {"port_bytes_per_s": POINT_TO_POINT_BYTES_PER_S}
        cluster = replace(cluster, hosts=tuple(replace(host, **ports) for host in cluster.hosts))
    at = [index for index, layer in enumerate(profile.layers) if not is_input(layer)]
    at.append(len(profile.layers))

    def seconds(fixed: list[FixedStage]) -> float:
        starts = [0, *(at[stage.start] for stage in fixed[1:]), len(profile.layers)]
        made = tuple(
            Stage(
                range(lo, hi),
                tuple(stage.devices),
                rows_by_speed(cluster, tuple(stage.devices), micro_batch),
            )
            for stage, lo, hi in zip(fixed, starts, starts[1:], strict=False)
        )
        plans = (Plan(made, global_batch // micro_batch, micro_batch, name) for name in SCHEDULES)
        return min(simulate_plan(plan, profile, cluster).iteration_s for plan in plans)

    ours, other = PLANS[model]
    return seconds(other) / seconds(ours)
