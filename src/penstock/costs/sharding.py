"""Sharding of a stage over its devices: the bytes that each keeps, and passes that gather layers.

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

from penstock.plan.plan import Plan


def with_sharding(plan: Plan, sharding: str) -> Plan:
    """The plan whose stages all divide the same among their devices."""
    return replace(plan, stages=tuple(replace(s, sharding=sharding) for s in plan.stages))
