"""Makes an order event by event: a free device group takes the action that a policy ranks first.

No policy can deadlock. A *place* is a stage for one direction of micro-batches, and takes its
micro-batches in order. So only older micro-batches and memory can hold a micro-batch up. A forward
is refused unless the group could still finish all micro-batches one after the other, oldest first
(the banker's algorithm):

    for every micro-batch k with a forward left on this group,
        what k and younger ones hold here + what k has yet to save here <= memory,

where micro-batches that only wait for W do not count, because W can run at once.

*Invariant:* this always holds. It holds at the start, because one micro-batch fits. A forward of
``m`` on place ``q`` changes no sum for ``k >= m`` (what it saves was still to be saved), and
`leaves_room` checks the sums for ``k < m``. Between two places of the group the sum is largest for
the oldest ``k``, so one check for each place is enough. Backwards only reduce the sums.

*Progress:* take the oldest unfinished micro-batch ``k``. Older ones hold nothing but what waits for
W. The places of ``k`` have served all older ones, so its next action is the next one of its place.
If it is a forward, it fits by the invariant once the group's W have run, and a group whose only
candidate does not fit runs a W. In-flight limits are at least one, so they do not stop ``k``
either. So some group can always proceed. A group that waits by choice waits for a message whose
arrival time is known.
"""

# The helpers of compiled functions carry no type annotations: numba infers their types.
# pyright: basic

from typing import NamedTuple

import numpy as np

from penstock.kernels import compiled

__all__ = ["ScheduleArrays", "Tables", "Wishes", "keys_of", "list_order", "tables_of"]

FORWARD, BACKWARD, WEIGHTS = range(3)
"""Rows of keys and arrivals, and columns of counts. BACKWARD is I, or B if backwards are whole."""

# Integer columns of a place. The first three count the actions done of each row.
GROUP, WAY, COUNT, LIMIT, DEPTH = range(3, 8)
# Columns of seconds and bytes of a place. The first three are the seconds of each row.
RECOMPUTE, TRANSFER, SAVED, KEPT = range(3, 7)
# Columns of a group: its places are `members[BEGIN:END]`; pending W; where its next action goes.
BEGIN, END, PENDING, NEXT = range(4)
# Columns of bytes (memory, used) and seconds (work left, end of the last action) of a group.
ROOM, USED, LEFT, FREE = range(4)

IDLE_PRICE, OVERLAP, MOST_PENDING, WEIGHT_OVERLAP, FORWARD_DELAY, LEAD = range(6)
"""Indices of the numbers of a policy."""


class ScheduleArrays(NamedTuple):
    """A pipeline in arrays over *places*: stage ``s`` of direction ``w`` is ``w * stages + s``."""

    stages: int
    ways: int
    split: bool
    first_of_group: np.ndarray
    members: np.ndarray
    group: np.ndarray
    way: np.ndarray
    micro_batches: np.ndarray
    limit: np.ndarray
    seconds: np.ndarray
    recompute_s: np.ndarray
    transfer_s: np.ndarray
    saved_bytes: np.ndarray
    kept_bytes: np.ndarray
    room_bytes: np.ndarray
    work_s: np.ndarray


class Wishes(NamedTuple):
    """A policy applied to a pipeline; `list_policy.Policy` explains the fields.

    ``keys[row, q, i]`` ranks the ``i``-th action of a row on place ``q``; the least goes first.
    """

    keys: np.ndarray
    depth: np.ndarray
    idle_price: float
    overlap: float
    most_pending: float
    weight_overlap: float
    forward_delay_s: float
    lead_s: float


class Tables(NamedTuple):
    """The state at the start of every play: places, their costs, groups and their memory."""

    place: np.ndarray
    costs: np.ndarray
    group: np.ndarray
    store: np.ndarray


def tables_of(arrays: ScheduleArrays) -> Tables:
    """The tables of a pipeline; `list_order` adds the depths."""
    zeros = np.zeros(len(arrays.group), np.int64)
    place = np.stack(
        [
            *(zeros, zeros, zeros, arrays.group, arrays.way, arrays.micro_batches),
            *(arrays.limit, zeros),
        ],
        axis=1,
    )
    costs = np.stack(
        [
            *arrays.seconds,
            *(arrays.recompute_s, arrays.transfer_s, arrays.saved_bytes, arrays.kept_bytes),
        ],
        axis=1,
    )
    groups, rows = len(arrays.room_bytes), 3 if arrays.split else 2
    actions = rows * np.bincount(arrays.group, arrays.micro_batches, groups).astype(np.int64)
    begins, ends = arrays.first_of_group[:-1], arrays.first_of_group[1:]
    starts = np.cumsum(actions) - actions
    store = np.zeros((groups, 4))
    store[:, ROOM], store[:, LEFT] = arrays.room_bytes, arrays.work_s
    return Tables(
        place, costs, np.stack([begins, ends, np.zeros_like(begins), starts], axis=1), store
    )


def list_order(
    arrays: ScheduleArrays, wishes: Wishes, best_s: float, tables: Tables | None = None
) -> tuple[np.ndarray, float]:
    """The order that ``wishes`` lead to, and its makespan in seconds.

    The order has a column for each action, group after group: row, place, index. The play stops as
    soon as it is certain to take ``best_s`` or longer; the makespan is then infinite and the order
    unfinished. ``tables`` can be passed to compute them once for many plays.
    """
    tables = tables or tables_of(arrays)
    place, group, store = tables.place.copy(), tables.group.copy(), tables.store.copy()
    place[:, DEPTH] = wishes.depth
    numbers = np.array(wishes[2:])
    order = np.empty((3, (3 if arrays.split else 2) * int(place[:, COUNT].sum())), np.int64)
    state = (place, tables.costs, group, store, arrays.members, wishes.keys, numbers, order)
    return order, compiled(play_wishes)(arrays.stages, arrays.ways, arrays.split, best_s, *state)


def keys_of(
    arrays: ScheduleArrays, hops_s: np.ndarray, turn_s: float, shift_s: float
) -> np.ndarray:
    """The keys of all actions, for micro-batches that enter every ``shift_s`` seconds.

    ``hops_s`` are the seconds from a stage to the next, on the first and second half of the stages,
    for forwards and then for backwards. ``turn_s`` pass between the last forward and the first
    backward.
    """
    numbers = int(arrays.micro_batches[:: arrays.stages].sum())
    keys = np.empty((3, len(arrays.group), -(-numbers // arrays.ways)))
    costs = (arrays.seconds, arrays.transfer_s)
    compiled(fill_keys)(keys, arrays.stages, arrays.ways, *costs, hops_s, turn_s, shift_s)
    return keys


def fill_keys(keys, stages, ways, seconds, way_s, hops, turn_s, shift_s):
    """The compiled part of `keys_of`."""
    begin_s, back_s = np.zeros(stages), np.zeros(stages)
    for s in range(1, stages):
        hop_s = max(hops[0, int(2 * s >= stages)], seconds[0, s - 1] + way_s[s - 1])
        begin_s[s] = begin_s[s - 1] + hop_s
    total_s = 0.0
    turn_at_s = begin_s[stages - 1] + seconds[0, stages - 1] + turn_s
    back_s[stages - 1] = turn_at_s
    for s in range(stages - 2, -1, -1):
        total_s += max(hops[1, int(2 * s >= stages)], seconds[1, s + 1] + way_s[s])
        back_s[s] = turn_at_s + total_s
    for w in range(ways):
        for s in range(stages):
            q = w * stages + s
            for i in range(keys.shape[2]):
                later_s = (w + ways * i) * shift_s
                keys[0, q, i] = begin_s[s] + later_s
                keys[1, q, i] = back_s[s] + later_s
                keys[2, q, i] = keys[1, q, i] + seconds[1, q]


def set_wake(wake_s, g, time_s):
    """Let group ``g`` decide at ``time_s``; ``wake_s`` is a binary tree of minima."""
    k = len(wake_s) // 2 + g
    wake_s[k] = time_s
    k //= 2
    while k >= 1:
        wake_s[k] = min(wake_s[2 * k], wake_s[2 * k + 1])
        k //= 2


def next_group(wake_s):
    """The group that decides next."""
    k = 1
    while 2 * k < len(wake_s):
        k = 2 * k if wake_s[2 * k] <= wake_s[2 * k + 1] else 2 * k + 1
    return k - len(wake_s) // 2


def leaves_room(q, ways, place, costs, group, store, members):
    """Whether all older micro-batches still fit one after the other after a forward on ``q``."""
    g = place[q, GROUP]
    begin, end = group[g, BEGIN], group[g, END]
    new = place[q, FORWARD] * ways + place[q, WAY]
    for x in range(begin, end):
        other = members[x]
        oldest = place[other, FORWARD] * ways + place[other, WAY]
        if oldest >= new:
            continue
        total = costs[q, SAVED]
        for y in range(begin, end):
            c = members[y]
            older = (oldest - place[c, WAY] + ways - 1) // ways
            held = place[c, FORWARD] - max(older, place[c, BACKWARD])
            total += costs[c, SAVED] * max(0, held)
            to_come = place[c, FORWARD] * ways + place[c, WAY] <= oldest
            if to_come and place[c, WAY] == place[other, WAY]:
                total += costs[c, SAVED]
        if total > store[g, ROOM]:
            return False
    return True


def choose(g, now_s, ways, place, costs, group, store, members, keys, arrival_s, numbers):
    """The best action of group ``g`` (row, place, start, whether a W must first free memory), the
    best that can start now (place, row), and the next arrival to wait for.

    An action that cannot start yet has its key raised by its waiting time times the idle price.
    """
    best = best_now = want_s = next_s = np.inf
    want = want_row = ready = ready_row = -1
    full = False
    for x in range(group[g, BEGIN], group[g, END]):
        q = members[x]
        for row in (BACKWARD, FORWARD):
            i = place[q, row]
            if row == BACKWARD:
                if i >= place[q, FORWARD]:
                    continue
            elif i >= place[q, COUNT] or i - place[q, BACKWARD] >= place[q, DEPTH]:
                continue
            at_s = max(now_s, arrival_s[row, q, i])
            if at_s == np.inf:
                continue
            key = keys[row, q, i] + numbers[IDLE_PRICE] * (at_s - now_s)
            if row == FORWARD:
                key += numbers[FORWARD_DELAY]
            if key >= best and (key >= best_now or at_s > now_s):
                continue
            needs_weights = False
            if row == FORWARD:
                needs_weights = (
                    i - place[q, WEIGHTS] >= place[q, LIMIT]
                    or store[g, USED] + costs[q, SAVED] > store[g, ROOM]
                )
                if needs_weights and group[g, PENDING] == 0:
                    continue
                if not leaves_room(q, ways, place, costs, group, store, members):
                    continue
            if at_s > now_s:
                next_s = min(next_s, at_s)
            if key < best:
                best, want, want_row, want_s, full = key, q, row, at_s, needs_weights
            if key < best_now and at_s <= now_s and not needs_weights:
                best_now, ready, ready_row = key, q, row
    return want, want_row, want_s, full, ready, ready_row, next_s


def next_weights(g, place, group, members, keys):
    """The place of the group whose pending W has the least key; some W must be pending."""
    best, found = np.inf, -1
    for x in range(group[g, BEGIN], group[g, END]):
        q = members[x]
        i = place[q, WEIGHTS]
        if i < place[q, BACKWARD] and (found < 0 or keys[WEIGHTS, q, i] < best):
            best, found = keys[WEIGHTS, q, i], q
    return found


def decide(g, now_s, ways, place, costs, group, store, members, keys, arrival_s, numbers):
    """Row and place of what group ``g`` starts now, else place -1 and when to decide again."""
    want, row, want_s, full, ready, ready_row, next_s = choose(
        g, now_s, ways, place, costs, group, store, members, keys, arrival_s, numbers
    )
    many = group[g, PENDING] > numbers[MOST_PENDING]
    if want >= 0 and want_s <= now_s and not full and not many:
        return row, want, now_s
    # Times are sums in different orders: an exact fit may look too long by rounding.
    little = 1e-9 * (1.0 + now_s)
    if group[g, PENDING] > 0:
        q = next_weights(g, place, group, members, keys)
        takes_s = costs[q, WEIGHTS]
        fits = now_s + takes_s <= want_s + numbers[WEIGHT_OVERLAP] * takes_s + little
        if many or want < 0 or fits or want_s <= now_s:
            return WEIGHTS, q, now_s
    if ready >= 0:
        takes_s = costs[ready, ready_row]
        if now_s + takes_s <= want_s + numbers[OVERLAP] * takes_s + little:
            return ready_row, ready, now_s
    return FORWARD, -1, next_s


def account(row, q, split, place, costs, group, store):
    """Count an action as done, and update the bytes in use."""
    g = place[q, GROUP]
    place[q, row] += 1
    store[g, LEFT] -= costs[q, row]
    if row == FORWARD:
        store[g, USED] += costs[q, SAVED]
    elif row == WEIGHTS:
        store[g, USED] -= costs[q, KEPT]
        group[g, PENDING] -= 1
    elif split:
        store[g, USED] -= costs[q, SAVED] - costs[q, KEPT]
        group[g, PENDING] += 1
    else:
        store[g, USED] -= costs[q, SAVED]
        place[q, WEIGHTS] += 1


def seconds_of(row, q, i, at, first, costs, order):
    """Seconds of an action, with recomputation unless its forward has just ended."""
    if row != BACKWARD or costs[q, RECOMPUTE] == 0.0:
        return costs[q, row]
    just_ran = at > first and order[0, at - 1] == FORWARD
    if just_ran and order[1, at - 1] == q and order[2, at - 1] == i:
        return costs[q, row]
    return costs[q, row] + costs[q, RECOMPUTE]


def play_wishes(
    stages, ways, split, best_s, place, costs, group, store, members, keys, numbers, order
):
    """Fill ``order``, group after group; the makespan, or infinity if not below ``best_s``."""
    leaves = 1
    while leaves < len(group):
        leaves *= 2
    wake_s = np.full(2 * leaves, np.inf)
    for g in range(len(group)):
        set_wake(wake_s, g, 0.0)
    arrival_s = np.full((2, len(place), keys.shape[2]), np.inf)
    for q in range(0, len(place), stages):
        for i in range(place[q, COUNT]):
            arrival_s[FORWARD, q, i] = max(0.0, keys[FORWARD, q, i] - numbers[LEAD])
    first = group[:, NEXT].copy()
    end_s = 0.0
    for _ in range(order.shape[1]):
        q = -1
        while q < 0:
            g = next_group(wake_s)
            now_s = wake_s[1]
            if now_s + store[g, LEFT] >= best_s or now_s == np.inf:
                return np.inf
            row, q, later_s = decide(
                g, now_s, ways, place, costs, group, store, members, keys, arrival_s, numbers
            )
            if q < 0:
                set_wake(wake_s, g, later_s)
        i, at = place[q, row], group[g, NEXT]
        free_s = now_s + seconds_of(row, q, i, at, first[g], costs, order)
        order[0, at], order[1, at], order[2, at] = row, q, i
        group[g, NEXT] += 1
        store[g, FREE] = free_s
        end_s = max(end_s, free_s)
        account(row, q, split, place, costs, group, store)
        set_wake(wake_s, g, free_s)
        step = 1 if row == FORWARD else -1
        if row == FORWARD and (q + 1) % stages == 0:
            arrival_s[BACKWARD, q, i] = free_s
        elif row != WEIGHTS and not (row == BACKWARD and q % stages == 0):
            there_s = free_s + costs[q if row == FORWARD else q - 1, TRANSFER]
            arrival_s[row, q + step, i] = there_s
            h = place[q + step, GROUP]
            there_s = max(there_s, store[h, FREE])
            if h != g and there_s < wake_s[leaves + h]:
                set_wake(wake_s, h, there_s)
    return end_s
