"""The memory layout of the compiled engine: a workload and the state of its play, in one array.

    [ counts | time | starts of lists | list | list | ... ]    int64, or float64 in the same bits

Compiled functions get the address of the array alone and read its parts by name
(`penstock.flat_record`): ``state.devices`` is a count, ``state.busy[resource]`` a value of a list.
A list of lists is stored as its concatenated items and the start of each list.

Numbers are those of `penstock.simulate.workload.Workload`: replicas in the order of their
instances, devices in the order of their groups, compute streams device after device. *Lanes* are
the messages, sorted by sender, direction (B before F) and receiver, then the reductions. *Items*
pass a lane one after the other: the micro-batches of a message, or the buckets of a reduction,
round after round.
*Wires* are engines, ports and links; together with the compute streams, which are numbered after
them, they are the *resources*.

An action as one integer, a *word*, for the compiled engine.

A STEP, a WAIT and a HOLD are words too. From the lowest bit on, a word has the kind (3 bits),
whether the action makes the last gradients before an update (1), the instance (20) and the
micro-batch. In a STEP the micro-batch only tells the iteration. In a WAIT, which waits for a step,
it is the number of that step. A HOLD precedes a forward that runs beside backwards; there it is how
many words the other stream may have left when the forward starts.
"""

import numpy as np
import numpy.typing as npt

from penstock.schedule.action import ACTION_KINDS

__all__ = [
    "FIRST_LIST",
    "HEADER",
    "HOLD",
    "INSTANCE_MASK",
    "INSTANCE_SHIFT",
    "KIND_MASK",
    "LIST_LENGTHS",
    "MICRO_SHIFT",
    "PARTS",
    "PIECES",
    "SEVERAL",
    "STANDS_STILL",
    "STEP",
    "UPDATES",
    "WAIT",
    "real_list",
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


# Bits of the count `blocking`: some device does not compute while it communicates; some such device
# may run several transfers at once.
STANDS_STILL, SEVERAL = 1, 2

COUNTS = (
    # Of the workload.
    "instances",
    "devices",
    "replicas",
    "streams",
    "streams_each",
    "hosts",
    "micro_batches",
    "messages",
    "reductions",
    "buckets",
    "lanes",
    "items",
    "wires",
    "resources",
    "words",
    "instance_segments",
    "replica_segments",
    "completions",
    "members",
    "occupations",
    "awaited",
    "first_leaf",
    "places",
    "records_spans",
    "action_spans",
    "item_spans",
    "blocking",
    # Of the play.
    "waited",
    "waiting",
    "acting",
    "ending",
)

# Each list: its name, whether it holds whole numbers, and its length: a count, times a factor,
# plus one where it holds the starts of lists.
LISTS: tuple[tuple[str, bool, str, int, int], ...] = (
    # Of the workload.
    ("word", True, "words", 1, 0),
    ("first_replica", True, "instances", 1, 0),
    ("stream_replica", True, "streams", 1, 0),
    ("shared_host", True, "streams", 1, 0),
    ("order_end", True, "streams", 1, 0),
    ("span_offset", True, "streams", 1, 0),
    ("device_host", True, "devices", 1, 0),
    ("replica_device", True, "replicas", 1, 0),
    ("segment_start", True, "replicas", 1, 0),
    ("first_segment", True, "replicas", 1, 0),
    ("segment_count", True, "replicas", 1, 0),
    ("completion_start", True, "instance_segments", 1, 1),
    ("completion", True, "completions", 1, 0),
    ("group_of_bucket", True, "buckets", 1, 0),
    ("bucket_start", True, "reductions", 1, 1),
    ("sends_start", True, "replicas", 2, 1),
    ("input_row", True, "messages", 1, 0),
    ("receiver", True, "messages", 1, 0),
    ("blocked_sender", True, "messages", 1, 0),
    ("item_start", True, "lanes", 1, 1),
    ("resource_start", True, "lanes", 1, 1),
    ("resource", True, "occupations", 1, 0),
    ("user_start", True, "resources", 1, 1),
    ("user", True, "occupations", 1, 0),
    ("member_start", True, "reductions", 1, 1),
    ("member", True, "members", 1, 0),
    ("buckets_each", True, "devices", 1, 0),
    ("members_each", True, "reductions", 1, 0),
    ("host_slots", True, "hosts", 1, 0),
    ("host_stream_start", True, "hosts", 1, 1),
    ("host_stream", True, "streams", 1, 0),
    ("talks_at_once", True, "streams", 1, 0),
    ("seconds", False, "replicas", PIECES, 0),
    ("step_seconds", False, "devices", 1, 0),
    ("segment_seconds", False, "replica_segments", 1, 0),
    ("message_seconds", False, "messages", 1, 0),
    ("bucket_seconds", False, "buckets", 1, 0),
    # Of the play. `running` follows `busy`: streams are the resources numbered after the wires.
    ("position", True, "streams", 1, 0),
    ("segment", True, "streams", 1, 0),
    ("buckets_left", True, "devices", 1, 0),
    ("steps_done", True, "devices", 1, 0),
    ("unsent", True, "devices", 1, 0),
    ("members_left", True, "buckets", 1, 0),
    ("rounds_done", True, "buckets", 1, 0),
    ("computing", True, "hosts", 1, 0),
    ("busy", True, "wires", 1, 0),
    ("running", True, "streams", 1, 0),
    ("waiting_for", True, "resources", 1, 0),
    ("head", True, "lanes", 1, 0),
    ("tail", True, "lanes", 1, 0),
    ("current", True, "lanes", 1, 0),
    ("inputs", True, "awaited", 1, 0),
    ("queue", True, "items", 1, 0),
    ("queue_sequence", True, "items", 1, 0),
    ("finish", False, "streams", 1, 0),
    ("work", False, "streams", 1, 0),
    ("claim", False, "streams", 1, 0),
    ("left", False, "streams", 1, 0),
    ("left_since", False, "streams", 1, 0),
    ("progress", False, "hosts", 1, 0),
    ("since", False, "hosts", 1, 0),
    ("next_s", False, "places", 1, 0),
    ("action_span", False, "action_spans", 2, 0),
    ("item_span", False, "item_spans", 2, 0),
)

FIRST_LIST = len(COUNTS) + 1
"""Place of the first list's start in the array: after the counts and the time."""

HEADER = FIRST_LIST + len(LISTS)

LIST_LENGTHS = tuple((COUNTS.index(count), factor, more) for _, _, count, factor, more in LISTS)
"""The length of every list, for compiled code: the place of a count, a factor, what is added."""

PARTS: tuple[tuple[str, int, bool, bool], ...] = (
    *((name, place, True, False) for place, name in enumerate(COUNTS)),
    ("now_s", len(COUNTS), False, False),
    *((name, FIRST_LIST + k, whole, True) for k, (name, whole, *_) in enumerate(LISTS)),
)
"""What is where, for `penstock.flat_record`: name, place, whether whole, whether a list."""


def real_list(state: npt.NDArray[np.int64], name: str) -> npt.NDArray[np.float64]:
    """The array from the start of a list of real numbers on."""
    place = FIRST_LIST + next(k for k, one in enumerate(LISTS) if one[0] == name)
    return state[state[place] :].view(np.float64)
