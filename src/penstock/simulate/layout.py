"""The memory layout of the compiled engine: a workload and the state of its play, in two arrays.

    whole   [ counts | starts of fields | field | field | ... ]    int64
    real    [ now | field | field | ... ]                          float64

``whole[FIELD]`` is where the field's values start, in whichever of the two arrays holds them. So
value ``i`` of a field is ``whole[whole[HOST] + i]`` or ``real[whole[FINISH] + i]``. A list of lists
is stored as its concatenated items and the start of each list. With two arrays, compiled functions
pass only two addresses to one another (`penstock.borrowed`).

Numbers are those of `penstock.simulate.workload.Workload`: replicas in the order of their
instances, devices in the order of their groups, compute streams device after device. *Lanes* are
the messages, sorted by sender, direction (B before F) and receiver, then the reductions. *Items*
pass a lane one after the other: the micro-batches of a message, or the buckets of a reduction,
round after round.

An action is one *word*, and so are a STEP, a WAIT and a HOLD. From the lowest bit on, a word has
the kind (3 bits), whether the action makes the last gradients before an update (1), the instance
(20) and the micro-batch. In a STEP the micro-batch only tells the iteration. In a WAIT, which waits
for a step, it is the number of that step. A HOLD precedes a forward that runs beside backwards;
there it is how many words the other stream may have left when the forward starts.
"""

import numpy as np

from penstock.schedule.action import ACTION_KINDS

__all__ = [
    "HEADER",
    "HOLD",
    "INSTANCE_SHIFT",
    "LENGTHS",
    "MICRO_SHIFT",
    "SEVERAL",
    "STANDS_STILL",
    "STEP",
    "UPDATES",
    "WAIT",
]

STEP = len(ACTION_KINDS)
WAIT = STEP + 1
HOLD = STEP + 2
PIECES = STEP + 1
"""Kinds of work of a replica: its actions by kind, then its part of the step."""

KIND_MASK = 7
UPDATES = 8
INSTANCE_SHIFT = 4
INSTANCE_MASK = (1 << 20) - 1
MICRO_SHIFT = 24

# Bits of BLOCKING: some device does not compute while it communicates; some such device may run
# several transfers at once.
STANDS_STILL, SEVERAL = 1, 2

# Counts of the workload, then of the play. Spans are counted only if they are recorded. Wires are
# engines, ports and links; wires and compute streams, in this order, are resources.
COUNTS = 31
(
    INSTANCES,
    DEVICES,
    REPLICAS,
    STREAMS,
    STREAMS_EACH,
    HOSTS,
    MICRO_BATCHES,
    MESSAGES,
    REDUCTIONS,
    BUCKETS,
    LANES,
    ITEMS,
    WIRES,
    RESOURCES,
    WORDS,
    INSTANCE_SEGMENTS,
    REPLICA_SEGMENTS,
    COMPLETIONS,
    MEMBERS,
    OCCUPATIONS,
    AWAITED,
    FIRST_LEAF,
    PLACES,
    SPANS,
    ACTION_SPANS,
    ITEM_SPANS,
    BLOCKING,
    WAITED,
    WAITING,
    ACTING,
    ENDING,
) = range(COUNTS)

# Integer fields of the workload, then of the play; the last two need no initial value.
# RUNNING must follow BUSY: the streams are the resources numbered after the wires.
REALS = 80
(
    WORD,
    FIRST_REPLICA,
    STREAM_REPLICA,
    SHARED_HOST,
    ORDER_END,
    SPAN_OFFSET,
    DEVICE_HOST,
    REPLICA_DEVICE,
    SEGMENT_START,
    FIRST_SEGMENT,
    SEGMENT_COUNT,
    COMPLETION_START,
    COMPLETION,
    GROUP_OF_BUCKET,
    BUCKET_START,
    SENDS_START,
    INPUT_ROW,
    RECEIVER,
    BLOCKED_SENDER,
    ITEM_START,
    RESOURCE_START,
    RESOURCE,
    USER_START,
    USER,
    MEMBER_START,
    MEMBER,
    BUCKETS_EACH,
    MEMBERS_EACH,
    HOST_SLOTS,
    HOST_STREAM_START,
    HOST_STREAM,
    TALKS_AT_ONCE,
    POSITION,
    SEGMENT,
    BUCKETS_LEFT,
    STEPS_DONE,
    UNSENT,
    MEMBERS_LEFT,
    ROUNDS_DONE,
    COMPUTING,
    BUSY,
    RUNNING,
    WAITING_FOR,
    HEAD,
    TAIL,
    CURRENT,
    INPUTS,
    QUEUE,
    QUEUE_SEQUENCE,
) = range(COUNTS, REALS)

# Float fields of the workload, then of the play (`real[NOW]` is the time itself).
NOW = 0
HEADER = 95
(
    SECONDS,
    STEP_SECONDS,
    SEGMENT_SECONDS,
    MESSAGE_SECONDS,
    BUCKET_SECONDS,
    FINISH,
    WORK,
    CLAIM,
    LEFT,
    LEFT_SINCE,
    PROGRESS,
    SINCE,
    NEXT,
    ACTION_SPAN,
    ITEM_SPAN,
) = range(REALS, HEADER)

# Length of a field: a count, times a factor, plus one if it holds the starts of lists.
LENGTH_OF_FIELD: dict[int, tuple[int, int, int]] = {
    WORD: (WORDS, 1, 0),
    FIRST_REPLICA: (INSTANCES, 1, 0),
    STREAM_REPLICA: (STREAMS, 1, 0),
    SHARED_HOST: (STREAMS, 1, 0),
    ORDER_END: (STREAMS, 1, 0),
    SPAN_OFFSET: (STREAMS, 1, 0),
    DEVICE_HOST: (DEVICES, 1, 0),
    REPLICA_DEVICE: (REPLICAS, 1, 0),
    SEGMENT_START: (REPLICAS, 1, 0),
    FIRST_SEGMENT: (REPLICAS, 1, 0),
    SEGMENT_COUNT: (REPLICAS, 1, 0),
    COMPLETION_START: (INSTANCE_SEGMENTS, 1, 1),
    COMPLETION: (COMPLETIONS, 1, 0),
    GROUP_OF_BUCKET: (BUCKETS, 1, 0),
    BUCKET_START: (REDUCTIONS, 1, 1),
    SENDS_START: (REPLICAS, 2, 1),
    INPUT_ROW: (MESSAGES, 1, 0),
    RECEIVER: (MESSAGES, 1, 0),
    BLOCKED_SENDER: (MESSAGES, 1, 0),
    ITEM_START: (LANES, 1, 1),
    RESOURCE_START: (LANES, 1, 1),
    RESOURCE: (OCCUPATIONS, 1, 0),
    USER_START: (RESOURCES, 1, 1),
    USER: (OCCUPATIONS, 1, 0),
    MEMBER_START: (REDUCTIONS, 1, 1),
    MEMBER: (MEMBERS, 1, 0),
    BUCKETS_EACH: (DEVICES, 1, 0),
    MEMBERS_EACH: (REDUCTIONS, 1, 0),
    HOST_SLOTS: (HOSTS, 1, 0),
    HOST_STREAM_START: (HOSTS, 1, 1),
    HOST_STREAM: (STREAMS, 1, 0),
    TALKS_AT_ONCE: (STREAMS, 1, 0),
    POSITION: (STREAMS, 1, 0),
    SEGMENT: (STREAMS, 1, 0),
    BUCKETS_LEFT: (DEVICES, 1, 0),
    STEPS_DONE: (DEVICES, 1, 0),
    UNSENT: (DEVICES, 1, 0),
    MEMBERS_LEFT: (BUCKETS, 1, 0),
    ROUNDS_DONE: (BUCKETS, 1, 0),
    COMPUTING: (HOSTS, 1, 0),
    BUSY: (WIRES, 1, 0),
    RUNNING: (STREAMS, 1, 0),
    WAITING_FOR: (RESOURCES, 1, 0),
    HEAD: (LANES, 1, 0),
    TAIL: (LANES, 1, 0),
    CURRENT: (LANES, 1, 0),
    INPUTS: (AWAITED, 1, 0),
    QUEUE: (ITEMS, 1, 0),
    QUEUE_SEQUENCE: (ITEMS, 1, 0),
    SECONDS: (REPLICAS, PIECES, 0),
    STEP_SECONDS: (DEVICES, 1, 0),
    SEGMENT_SECONDS: (REPLICA_SEGMENTS, 1, 0),
    MESSAGE_SECONDS: (MESSAGES, 1, 0),
    BUCKET_SECONDS: (BUCKETS, 1, 0),
    FINISH: (STREAMS, 1, 0),
    WORK: (STREAMS, 1, 0),
    CLAIM: (STREAMS, 1, 0),
    LEFT: (STREAMS, 1, 0),
    LEFT_SINCE: (STREAMS, 1, 0),
    PROGRESS: (HOSTS, 1, 0),
    SINCE: (HOSTS, 1, 0),
    NEXT: (PLACES, 1, 0),
    ACTION_SPAN: (ACTION_SPANS, 2, 0),
    ITEM_SPAN: (ITEM_SPANS, 2, 0),
}

LENGTHS = np.array([LENGTH_OF_FIELD[field] for field in range(COUNTS, HEADER)], dtype=np.int64)
"""`LENGTH_OF_FIELD` as an array for compiled code, from the first field on."""
