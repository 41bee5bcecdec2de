"""Where the compiled engine keeps a workload and the state of its play: two flat arrays.

    whole   [ counts | starts of fields | field | field | ... ]    int64
    real    [ now | field | field | ... ]                          float64

``whole[FIELD]`` is where the field's values start, in whichever of the two arrays holds them; so
value ``i`` of a field is ``whole[whole[HOST] + i]`` or ``real[whole[FINISH] + i]``. A list of
lists is its joined items and where each list starts. Two arrays, because passing an array costs
numba a reference count: with one array a field the engine was more than twenty times slower.

Devices are numbered by position, in order of stage and replica. *Lanes* are the messages, sorted
by sender, direction (B before F) and receiver, then the reductions. *Items* are what passes a
lane one after the other: the micro-batches of a message, the buckets of a reduction.
"""

import numpy as np

from penstock.schedule.action import ActionKind

__all__ = ["HEADER", "KIND_CODES", "LENGTHS"]

KIND_CODES: dict[ActionKind, int] = {"F": 0, "B": 1, "I": 2, "W": 3, "R": 4}
STEP = len(KIND_CODES)
PIECES = STEP + 1
"""Different pieces of work of a device: its actions by kind, then the step."""

# Counts: of the workload, then of the play. The spans are counted only where they are recorded.
COUNTS = 24
(
    STAGES,
    DEVICES,
    HOSTS,
    MICRO_BATCHES,
    MESSAGES,
    GROUPS,
    BUCKETS,
    LANES,
    ITEMS,
    RESOURCES,
    ORDERED_ACTIONS,
    STAGE_SEGMENTS,
    DEVICE_SEGMENTS,
    COMPLETIONS,
    MEMBERS,
    OCCUPATIONS,
    AWAITED,
    LEAVES,
    SPANS,
    ACTION_SPANS,
    ITEM_SPANS,
    WAITED,
    WAITING,
    ACTING,
) = range(COUNTS)

# Whole numbers: of the workload, then of the play; the last two need no first value.
REALS = 62
(
    HOST,
    SHARED_HOST,
    ORDER_KIND,
    ORDER_MICRO,
    ORDER_END,
    LAST_BACKWARD,
    SPAN_OFFSET,
    SEGMENT_START,
    FIRST_SEGMENT,
    SEGMENT_COUNT,
    COMPLETION_START,
    COMPLETION,
    GROUP_OF_BUCKET,
    SENDS_START,
    INPUT_ROW,
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
    POSITION,
    SEGMENT,
    RUNNING,
    BUCKETS_LEFT,
    MEMBERS_LEFT,
    COMPUTING,
    BUSY,
    HEAD,
    TAIL,
    CURRENT,
    INPUTS,
    QUEUE,
    QUEUE_SEQUENCE,
) = range(COUNTS, REALS)

# Real numbers: of the workload, then of the play (`real[NOW]` is the time itself).
NOW = 0
HEADER = 73
(
    SECONDS,
    SEGMENT_SECONDS,
    MESSAGE_SECONDS,
    BUCKET_SECONDS,
    FINISH,
    PROGRESS,
    SINCE,
    NEXT,
    ACTION_SPAN,
    ITEM_SPAN,
    STEP_SPAN,
) = range(REALS, HEADER)

# How long a field is: a count, times a factor, plus one where it holds the starts of lists.
LENGTH_OF_FIELD: dict[int, tuple[int, int, int]] = {
    HOST: (DEVICES, 1, 0),
    SHARED_HOST: (DEVICES, 1, 0),
    ORDER_KIND: (ORDERED_ACTIONS, 1, 0),
    ORDER_MICRO: (ORDERED_ACTIONS, 1, 0),
    ORDER_END: (DEVICES, 1, 0),
    LAST_BACKWARD: (DEVICES, 1, 0),
    SPAN_OFFSET: (DEVICES, 1, 0),
    SEGMENT_START: (DEVICES, 1, 0),
    FIRST_SEGMENT: (DEVICES, 1, 0),
    SEGMENT_COUNT: (DEVICES, 1, 0),
    COMPLETION_START: (STAGE_SEGMENTS, 1, 1),
    COMPLETION: (COMPLETIONS, 1, 0),
    GROUP_OF_BUCKET: (BUCKETS, 1, 0),
    SENDS_START: (DEVICES, 2, 1),
    INPUT_ROW: (MESSAGES, 1, 0),
    ITEM_START: (LANES, 1, 1),
    RESOURCE_START: (LANES, 1, 1),
    RESOURCE: (OCCUPATIONS, 1, 0),
    USER_START: (RESOURCES, 1, 1),
    USER: (OCCUPATIONS, 1, 0),
    MEMBER_START: (GROUPS, 1, 1),
    MEMBER: (MEMBERS, 1, 0),
    HOST_SLOTS: (HOSTS, 1, 0),
    HOST_DEVICE_START: (HOSTS, 1, 1),
    HOST_DEVICE: (DEVICES, 1, 0),
    POSITION: (DEVICES, 1, 0),
    SEGMENT: (DEVICES, 1, 0),
    RUNNING: (DEVICES, 1, 0),
    BUCKETS_LEFT: (DEVICES, 1, 0),
    MEMBERS_LEFT: (BUCKETS, 1, 0),
    COMPUTING: (HOSTS, 1, 0),
    BUSY: (RESOURCES, 1, 0),
    HEAD: (LANES, 1, 0),
    TAIL: (LANES, 1, 0),
    CURRENT: (LANES, 1, 0),
    INPUTS: (AWAITED, 1, 0),
    QUEUE: (ITEMS, 1, 0),
    QUEUE_SEQUENCE: (ITEMS, 1, 0),
    SECONDS: (DEVICES, PIECES, 0),
    SEGMENT_SECONDS: (DEVICE_SEGMENTS, 1, 0),
    MESSAGE_SECONDS: (MESSAGES, 1, 0),
    BUCKET_SECONDS: (BUCKETS, 1, 0),
    FINISH: (DEVICES, 1, 0),
    PROGRESS: (HOSTS, 1, 0),
    SINCE: (HOSTS, 1, 0),
    NEXT: (LEAVES, 2, 0),
    ACTION_SPAN: (ACTION_SPANS, 2, 0),
    ITEM_SPAN: (ITEM_SPANS, 2, 0),
    STEP_SPAN: (SPANS, 2, 0),
}

LENGTHS = np.array([LENGTH_OF_FIELD[field] for field in range(COUNTS, HEADER)], dtype=np.int64)
"""`LENGTH_OF_FIELD` for compiled code, from the first field on."""
