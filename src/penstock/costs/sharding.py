"""What the devices of a stage divide: the bytes that each keeps, and passes that gather layers.

With "optimizer" (ZeRO-1: Rajbhandari et al., SC 2020) as many bytes are sent as in an all-reduce.
With "parameters" (ZeRO-3; Zhao et al., PyTorch FSDP, VLDB 2023) every layer is gathered before its
forward and again before its backward, and its gradients are summed and scattered after that, in
every micro-batch. A gather and a scatter are each half an all-reduce
(`penstock.cluster.collectives`). No gradient is left to sum at the end, and of the optimizer's step
each device does its share.

These messages pass beside the computing of their stage (`GatheredPass` in `core/costs.hpp`), and do
not wait for those of other stages.
"""

from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.cluster import Cluster
from penstock.cluster.collectives import all_reduce_s
from penstock.core.native import gathered_pass_s
from penstock.plan.plan import Plan, Stage
from penstock.profile.model_profile import ModelProfile

Bytes = TypeVar("Bytes", float, NDArray[np.float64])


def held_bytes(
    sharding: str, devices: float, parameters: Bytes, two_layers: Bytes, copies: float, state: float
) -> Bytes:
    """Bytes that each of some devices holds all the time: parameters, gradients, optimizer state.

    ``copies`` are those of parameters and gradients, ``state`` the optimizer's bytes for each byte
    of parameters. Where parameters are divided, two layers that follow one another are whole at a
    time, with their gradients: ``two_layers`` are the bytes of the two largest.
    """
    if sharding == "parameters":
        return parameters * ((copies + state) / devices) + two_layers * 2
    return parameters * (copies + (state / devices if sharding else state))


def step_share(stage: Stage) -> float:
    """The share of a stage's optimizer step that each of its devices does."""
    return 1 / stage.replicas if stage.sharding == "parameters" else 1.0


def layer_bytes(profile: ModelProfile, layers: range) -> list[float]:
    """Bytes of the parameters of each layer, what layers share with the first of them."""
    sizes = [float(profile.layers[layer].parameter_bytes) for layer in layers]
    for shared in profile.shared:
        if users := [layer for layer in shared.layers if layer in layers]:
            sizes[min(users) - layers.start] += shared.bytes
    return sizes


def two_layers_bytes(profile: ModelProfile, layers: range) -> float:
    """Bytes of the parameters of the two largest layers that follow one another."""
    sizes = layer_bytes(profile, layers)
    return max((a + b for a, b in pairwise(sizes)), default=sum(sizes))


def gathered_s(profile: ModelProfile, cluster: Cluster, stage: Stage, *, forward: bool) -> float:
    """Seconds of a forward or a backward of a stage that divides parameters.

    Of each layer that of the slowest device counts, because the others wait for its messages.
    """
    kinds = {
        (rows, cluster.devices[device].speed)
        for rows, device in zip(stage.slices, stage.devices, strict=True)
    }
    sizes = layer_bytes(profile, stage.layers)
    gathers_s: list[float] = []
    computes_s: list[float] = []
    for index in stage.layers:
        layer = profile.layers[index]
        cost = layer.forward_s if forward else layer.backward_s
        computes_s.append(max(cost.at(rows) / speed for rows, speed in kinds))
        size = sizes[index - stage.layers.start]
        gathers_s.append(all_reduce_s(cluster, stage.devices, size) / 2)
    if forward:
        return gathered_pass_s(gathers_s, computes_s, False)
    return gathered_pass_s(gathers_s[::-1], computes_s[::-1], True)


def with_sharding(plan: Plan, sharding: str) -> Plan:
    """The plan whose stages all divide the same among their devices."""
    return replace(plan, stages=tuple(replace(s, sharding=sharding) for s in plan.stages))
