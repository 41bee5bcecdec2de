"""A workload and the state of its play in two flat arrays, for the compiled engine.

    whole   [ header | field | field | ... ]    int64
    real    [ now | field | field | ... ]       float64

``whole[FIELD]`` is where the field's values start, in whichever of the two arrays holds them; so
value ``i`` of a field is ``whole[whole[STAGE] + i]`` or ``real[whole[FINISH] + i]``. Counts are
kept in the header itself. A list of lists is its joined items and where each list starts. Two
arrays, because passing an array costs numba a reference count: with one array a field the engine
was more than twenty times slower.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.schedule.action import ActionKind
from penstock.schedule.schedule import Schedule
from penstock.simulate.workload import Workload

__all__ = ["Arrays", "OrderArrays", "arrays_of", "order_arrays"]

Whole: TypeAlias = npt.NDArray[np.int64]
Real: TypeAlias = npt.NDArray[np.float64]

KIND_CODES: dict[ActionKind, int] = {"F": 0, "B": 1, "I": 2, "W": 3, "R": 4}
KINDS = len(KIND_CODES)

# Counts, in the header itself: of the workload, then of the play.
COUNTS = 7
DEVICES, MESSAGES, MICRO_BATCHES, KIND_COUNT, WAITED, WAITING, HEAP_SIZE = range(COUNTS)

# Whole numbers that do not change.
(
    STAGE,
    HOST,
    ORDER_START,
    ORDER_KIND,
    ORDER_MICRO,
    ACTION_START,
    LAST_BACKWARD,
    SEGMENT_START,
    SEGMENT_BUCKET_START,
    SEGMENT_BUCKET,
    GROUP_OF_BUCKET,
    SENDS_START,
    SENDS,
    RECEIVER,
    DIRECTION,
    ITEM_START,
    RESOURCE_START,
    RESOURCE,
    USER_START,
    USER,
    MEMBER_START,
    MEMBER,
    HOST_SLOTS,
    HOST_DEVICE_START,
    HOST_DEVICE,
) = range(COUNTS, 32)

# Whole numbers of the play.
(
    POSITION,
    SEGMENT,
    RUNNING,
    INPUTS,
    BUCKETS_LEFT,
    MEMBERS_LEFT,
    COMPUTING,
    BUSY,
    QUEUE,
    QUEUE_SEQUENCE,
    HEAD,
    TAIL,
    CURRENT,
    HEAP,
    PLACE,
) = range(32, 47)

# Real numbers: of the workload, then of the play (`real[NOW]` is the time itself).
NOW = 0
(
    SECONDS,
    STEP_SECONDS,
    SEGMENT_SECONDS,
    ITEM_SECONDS,
    FINISH,
    PROGRESS,
    SINCE,
    KEY,
    ACTION_SPAN,
    ITEM_SPAN,
    STEP_SPAN,
) = range(47, 58)
HEADER = 58


@dataclass(frozen=True, slots=True)
class OrderArrays:
    """The orders of a schedule: where each starts, and kind and micro-batch of every action."""

    start: Whole
    kind: Whole
    micro: Whole


@dataclass(frozen=True, slots=True)
class Arrays:
    """The two arrays of one workload, before anything has happened."""

    whole: Whole
    real: Real


def order_arrays(schedule: Schedule) -> OrderArrays:
    """Flatten the orders of ``schedule``."""
    start, kind = joined([[KIND_CODES[a.kind] for a in order] for order in schedule.orders])
    micro = np.array([a.micro_batch for order in schedule.orders for a in order], dtype=np.int64)
    return OrderArrays(start, kind, micro)


def arrays_of(workload: Workload, orders: OrderArrays | None = None) -> Arrays:
    """Flatten ``workload``; ``orders`` saves time where its schedule was flattened before."""
    orders = orders or order_arrays(workload.schedule)
    whole = {
        **order_fields(workload, orders),
        **gradient_fields(workload),
        **transfer_fields(workload),
        **host_fields(workload),
        **play_fields(workload),
    }
    real = real_fields(workload)
    actions = int(whole[ACTION_START][-1])
    items = len(real[ITEM_SECONDS])
    whole[QUEUE] = whole[QUEUE_SEQUENCE] = np.zeros(items, dtype=np.int64)
    real[ACTION_SPAN], real[ITEM_SPAN] = np.zeros(2 * actions), np.zeros(2 * items)
    header = np.zeros(HEADER, dtype=np.int64)
    header[DEVICES] = len(workload.devices)
    header[MESSAGES] = len(workload.messages)
    header[MICRO_BATCHES] = workload.micro_batches
    header[KIND_COUNT] = KINDS
    place_fields(header, whole, HEADER)
    place_fields(header, real, 1)
    return Arrays(
        np.concatenate([header, *whole.values()]), np.concatenate([np.zeros(1), *real.values()])
    )


def place_fields(header: Whole, fields: dict[int, Whole] | dict[int, Real], start: int) -> None:
    """Write into the header where each field starts when they are joined after ``start``."""
    for field, values in fields.items():
        header[field] = start
        start += len(values)


def order_fields(workload: Workload, orders: OrderArrays) -> dict[int, Whole]:
    """Devices and their orders of work."""
    stage = whole_of(work.stage for work in workload.devices)
    lengths = np.diff(orders.start)[stage]
    return {
        STAGE: stage,
        HOST: whole_of(work.host for work in workload.devices),
        ORDER_START: orders.start,
        ORDER_KIND: orders.kind,
        ORDER_MICRO: orders.micro,
        ACTION_START: np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)]),
        LAST_BACKWARD: whole_of(workload.last_backward),
    }


def gradient_fields(workload: Workload) -> dict[int, Whole]:
    """Segments of last backwards, their buckets, and what of them is still to come."""
    groups = workload.reductions
    segments = [segment for work in workload.devices for segment in work.last_backward]
    bucket_start, bucket = joined([segment.buckets for segment in segments])
    member_start, member = joined([group.members for group in groups])
    left = np.zeros(len(workload.devices), dtype=np.int64)
    for group in groups:
        left[list(group.members)] += len(group.buckets)
    counts = [len(work.last_backward) for work in workload.devices]
    return {
        SEGMENT_START: whole_of(accumulate(counts, initial=0)),
        SEGMENT_BUCKET_START: bucket_start,
        SEGMENT_BUCKET: bucket,
        GROUP_OF_BUCKET: whole_of(i for i, group in enumerate(groups) for _ in group.buckets),
        MEMBER_START: member_start,
        MEMBER: member,
        BUCKETS_LEFT: left,
        MEMBERS_LEFT: whole_of(len(group.members) for group in groups for _ in group.buckets),
    }


def transfer_fields(workload: Workload) -> dict[int, Whole]:
    """Messages and reductions ("lanes"), their resources, and the inputs still to come."""
    devices, messages, groups = workload.devices, workload.messages, workload.reductions
    sends: list[list[int]] = [[] for _ in range(2 * len(devices))]
    inputs = np.zeros(2 * len(devices), dtype=np.int64)
    for index, message in enumerate(messages):
        direction = int(message.direction == "B")
        sends[2 * message.sender + direction].append(index)
        inputs[2 * message.receiver + direction] += 1
    occupied = [lane.resources for lane in (*messages, *groups)]
    users: list[list[int]] = [[] for _ in range(workload.resources)]
    for index, resources in enumerate(occupied):
        for resource in resources:
            users[resource].append(index)
    sends_start, sent = joined(sends)
    resource_start, resource = joined(occupied)
    user_start, user = joined(users)
    items = [workload.micro_batches] * len(messages) + [len(group.buckets) for group in groups]
    return {
        SENDS_START: sends_start,
        SENDS: sent,
        RECEIVER: whole_of(message.receiver for message in messages),
        DIRECTION: whole_of(int(message.direction == "B") for message in messages),
        ITEM_START: whole_of(accumulate(items, initial=0)),
        RESOURCE_START: resource_start,
        RESOURCE: resource,
        USER_START: user_start,
        USER: user,
        INPUTS: np.repeat(inputs, workload.micro_batches),
    }


def host_fields(workload: Workload) -> dict[int, Whole]:
    """Compute slots, and which devices share them."""
    on_host: list[list[int]] = [[] for _ in workload.host_slots]
    for position, work in enumerate(workload.devices):
        on_host[work.host].append(position)
    start, device = joined(on_host)
    return {
        HOST_SLOTS: whole_of(workload.host_slots),
        HOST_DEVICE_START: start,
        HOST_DEVICE: device,
    }


def play_fields(workload: Workload) -> dict[int, Whole]:
    """Room for what changes; nothing is running, waiting or busy."""
    devices = len(workload.devices)
    lanes = len(workload.messages) + len(workload.reductions)
    lengths = {
        POSITION: devices,
        SEGMENT: devices,
        RUNNING: devices,
        COMPUTING: len(workload.host_slots),
        BUSY: workload.resources,
        HEAD: lanes,
        TAIL: lanes,
        CURRENT: lanes,
        HEAP: devices + lanes,
        PLACE: devices + lanes,
    }
    fields = {field: np.zeros(length, dtype=np.int64) for field, length in lengths.items()}
    fields[PLACE] -= 1
    return fields


def real_fields(workload: Workload) -> dict[int, Real]:
    """Seconds of everything, and room for times and spans."""
    devices, hosts = len(workload.devices), len(workload.host_slots)
    sources = devices + len(workload.messages) + len(workload.reductions)
    messages = real_of(message.seconds for message in workload.messages)
    buckets = real_of(bucket.seconds for group in workload.reductions for bucket in group.buckets)
    return {
        SECONDS: real_of(work.seconds(kind) for work in workload.devices for kind in KIND_CODES),
        STEP_SECONDS: real_of(work.step_s for work in workload.devices),
        SEGMENT_SECONDS: real_of(
            segment.seconds for work in workload.devices for segment in work.last_backward
        ),
        ITEM_SECONDS: np.concatenate([np.repeat(messages, workload.micro_batches), buckets]),
        FINISH: np.zeros(devices),
        PROGRESS: np.zeros(hosts),
        SINCE: np.zeros(hosts),
        KEY: np.zeros(sources),
        STEP_SPAN: np.zeros(2 * devices),
    }


def joined(lists: Sequence[Sequence[int]]) -> tuple[Whole, Whole]:
    """Where each list starts (and the last ends), and all items one after the other."""
    starts = np.fromiter(accumulate(map(len, lists), initial=0), np.int64, len(lists) + 1)
    return starts, np.array([item for items in lists for item in items], dtype=np.int64)


def whole_of(values: Iterable[int]) -> Whole:
    """Whole numbers as an array."""
    return np.array(list(values), dtype=np.int64)


def real_of(values: Iterable[float]) -> Real:
    """Real numbers as an array."""
    return np.array(list(values), dtype=np.float64)
