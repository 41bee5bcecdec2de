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

from penstock.flat_record import borrowed
from penstock.kernels import compiled

__all__ = ["ScheduleArrays", "Wishes", "keys_of", "list_order"]

FORWARD, BACKWARD, WEIGHTS = range(3)
"""Rows of seconds, keys, arrivals and counts. BACKWARD is I, or B if backwards are whole."""


class ScheduleArrays(NamedTuple):
    """A pipeline in arrays over *places*: stage ``s`` of direction ``w`` is ``w * stages + s``.

    ``seconds`` has a row for each kind of action. A place has at most ``indices`` micro-batches.
    The places of group ``g`` are ``members[first_of_group[g] : first_of_group[g + 1]]``; its
    actions begin at ``order_starts[g]`` of an order.
    """

    stages: int
    directions: int
    split: bool
    places: int
    indices: int
    first_of_group: np.ndarray
    members: np.ndarray
    group: np.ndarray
    direction: np.ndarray
    micro_batches: np.ndarray
    limit: np.ndarray
    seconds: np.ndarray
    recompute_s: np.ndarray
    transfer_s: np.ndarray
    saved_bytes: np.ndarray
    kept_bytes: np.ndarray
    limit_bytes: np.ndarray
    work_s: np.ndarray
    order_starts: np.ndarray


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


class Played(NamedTuple):
    """The state of a play, as arrays that change in place.

    ``done[row * places + q]`` counts the actions of a row on place ``q``; ``arrival_s`` says when
    what each action needs arrives (see `action_at`; no row for W). By group: how many W are
    pending, where its next action goes in the order, bytes in use, seconds of work left, and the
    end of its last action.
    """

    done: np.ndarray
    arrival_s: np.ndarray
    pending: np.ndarray
    following: np.ndarray
    used_bytes: np.ndarray
    left_s: np.ndarray
    free_s: np.ndarray


def list_order(arrays: ScheduleArrays, wishes: Wishes, best_s: float) -> tuple[np.ndarray, float]:
    """The order that ``wishes`` lead to, and its makespan in seconds.

    The order has a column for each action, group after group: row, place, index. The play stops as
    soon as it is certain to take ``best_s`` or longer; the makespan is then infinite and the order
    unfinished.
    """
    rows, places, indices = wishes.keys.shape
    groups = len(arrays.limit_bytes)
    played = Played(
        np.zeros(rows * places, np.int64),
        np.full(2 * places * indices, np.inf),
        np.zeros(groups, np.int64),
        arrays.order_starts.copy(),
        np.zeros(groups),
        arrays.work_s.copy(),
        np.zeros(groups),
    )
    order = np.empty((3, (3 if arrays.split else 2) * int(arrays.micro_batches.sum())), np.int64)
    return order, compiled(play_wishes)(arrays, wishes, played, best_s, order)


def keys_of(
    arrays: ScheduleArrays, hops_s: np.ndarray, turn_s: float, shift_s: float
) -> np.ndarray:
    """The keys of all actions, for micro-batches that enter every ``shift_s`` seconds.

    ``hops_s`` are the seconds from a stage to the next, on the first and second half of the stages,
    for forwards and then for backwards. ``turn_s`` pass between the last forward and the first
    backward.
    """
    keys = np.empty((3, arrays.places, arrays.indices))
    costs = (arrays.seconds, arrays.transfer_s)
    compiled(fill_keys)(keys, arrays.stages, arrays.directions, *costs, hops_s, turn_s, shift_s)
    return keys


def fill_keys(keys, stages, directions, seconds, transfer_s, hops, turn_s, shift_s):
    """The compiled part of `keys_of`."""
    begin_s, back_s = np.zeros(stages), np.zeros(stages)
    for s in range(1, stages):
        hop_s = max(hops[0, int(2 * s >= stages)], seconds[0, s - 1] + transfer_s[s - 1])
        begin_s[s] = begin_s[s - 1] + hop_s
    total_s = 0.0
    turn_at_s = begin_s[stages - 1] + seconds[0, stages - 1] + turn_s
    back_s[stages - 1] = turn_at_s
    for s in range(stages - 2, -1, -1):
        total_s += max(hops[1, int(2 * s >= stages)], seconds[1, s + 1] + transfer_s[s])
        back_s[s] = turn_at_s + total_s
    for w in range(directions):
        for s in range(stages):
            q = w * stages + s
            for i in range(keys.shape[2]):
                later_s = (w + directions * i) * shift_s
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


def action_at(row, q, i, pipe):
    """Where keys and arrivals keep action ``i`` of a row on place ``q``."""
    return (row * pipe.places + q) * pipe.indices + i


def leaves_room(q, pipe, played):
    """Whether all older micro-batches still fit one after the other after a forward on ``q``."""
    directions, direction, saved_bytes = pipe.directions, pipe.direction, pipe.saved_bytes
    forwards, backwards = FORWARD * pipe.places, BACKWARD * pipe.places
    g = pipe.group[q]
    begin, end = pipe.first_of_group[g], pipe.first_of_group[g + 1]
    new = played.done[forwards + q] * directions + direction[q]
    for x in range(begin, end):
        other = pipe.members[x]
        oldest = played.done[forwards + other] * directions + direction[other]
        if oldest >= new:
            continue
        total = saved_bytes[q]
        for y in range(begin, end):
            c = pipe.members[y]
            older = (oldest - direction[c] + directions - 1) // directions
            held = played.done[forwards + c] - max(older, played.done[backwards + c])
            total += saved_bytes[c] * max(0, held)
            to_come = played.done[forwards + c] * directions + direction[c] <= oldest
            if to_come and direction[c] == direction[other]:
                total += saved_bytes[c]
        if total > pipe.limit_bytes[g]:
            return False
    return True


def choose(g, now_s, pipe, wishes, played):
    """The best action of group ``g`` (row, place, start, whether a W must first free memory), the
    best that can start now (place, row), and the next arrival to wait for.

    An action that cannot start yet has its key raised by its waiting time times the idle price.
    """
    places, done = pipe.places, played.done
    best = best_now = want_s = next_s = np.inf
    want = want_row = ready = ready_row = -1
    full = False
    for x in range(pipe.first_of_group[g], pipe.first_of_group[g + 1]):
        q = pipe.members[x]
        for row in (BACKWARD, FORWARD):
            i = done[row * places + q]
            if row == BACKWARD:
                if i >= done[FORWARD * places + q]:
                    continue
            elif i >= pipe.micro_batches[q] or i - done[BACKWARD * places + q] >= wishes.depth[q]:
                continue
            action = action_at(row, q, i, pipe)
            at_s = max(now_s, played.arrival_s[action])
            if at_s == np.inf:
                continue
            key = wishes.keys[action] + wishes.idle_price * (at_s - now_s)
            if row == FORWARD:
                key += wishes.forward_delay_s
            if key >= best and (key >= best_now or at_s > now_s):
                continue
            needs_weights = False
            if row == FORWARD:
                needs_weights = (
                    i - done[WEIGHTS * places + q] >= pipe.limit[q]
                    or played.used_bytes[g] + pipe.saved_bytes[q] > pipe.limit_bytes[g]
                )
                if needs_weights and played.pending[g] == 0:
                    continue
                if not leaves_room(q, pipe, played):
                    continue
            if at_s > now_s:
                next_s = min(next_s, at_s)
            if key < best:
                best, want, want_row, want_s, full = key, q, row, at_s, needs_weights
            if key < best_now and at_s <= now_s and not needs_weights:
                best_now, ready, ready_row = key, q, row
    return want, want_row, want_s, full, ready, ready_row, next_s


def next_weights(g, pipe, wishes, played):
    """The place of the group whose pending W has the least key; some W must be pending."""
    places, best, found = pipe.places, np.inf, -1
    for x in range(pipe.first_of_group[g], pipe.first_of_group[g + 1]):
        q = pipe.members[x]
        i = played.done[WEIGHTS * places + q]
        if i < played.done[BACKWARD * places + q]:
            key = wishes.keys[action_at(WEIGHTS, q, i, pipe)]
            if found < 0 or key < best:
                best, found = key, q
    return found


def decide(g, now_s, pipe, wishes, played):
    """Row and place of what group ``g`` starts now, else place -1 and when to decide again."""
    want, row, want_s, full, ready, ready_row, next_s = choose(g, now_s, pipe, wishes, played)
    many = played.pending[g] > wishes.most_pending
    if want >= 0 and want_s <= now_s and not full and not many:
        return row, want, now_s
    # Times are sums in different orders: an exact fit may look too long by rounding.
    little = 1e-9 * (1.0 + now_s)
    if played.pending[g] > 0:
        q = next_weights(g, pipe, wishes, played)
        takes_s = pipe.seconds[WEIGHTS * pipe.places + q]
        fits = now_s + takes_s <= want_s + wishes.weight_overlap * takes_s + little
        if many or want < 0 or fits or want_s <= now_s:
            return WEIGHTS, q, now_s
    if ready >= 0:
        takes_s = pipe.seconds[ready_row * pipe.places + ready]
        if now_s + takes_s <= want_s + wishes.overlap * takes_s + little:
            return ready_row, ready, now_s
    return FORWARD, -1, next_s


def account(row, q, pipe, played):
    """Count an action as done, and update the bytes in use."""
    g = pipe.group[q]
    played.done[row * pipe.places + q] += 1
    played.left_s[g] -= pipe.seconds[row * pipe.places + q]
    if row == FORWARD:
        played.used_bytes[g] += pipe.saved_bytes[q]
    elif row == WEIGHTS:
        played.used_bytes[g] -= pipe.kept_bytes[q]
        played.pending[g] -= 1
    elif pipe.split:
        played.used_bytes[g] -= pipe.saved_bytes[q] - pipe.kept_bytes[q]
        played.pending[g] += 1
    else:
        played.used_bytes[g] -= pipe.saved_bytes[q]
        played.done[WEIGHTS * pipe.places + q] += 1


def seconds_of(row, q, i, at, pipe, order):
    """Seconds of an action, with recomputation unless its forward has just ended."""
    seconds = pipe.seconds[row * pipe.places + q]
    if row != BACKWARD or pipe.recompute_s[q] == 0.0:
        return seconds
    just_ran = at > pipe.order_starts[pipe.group[q]] and order[0, at - 1] == FORWARD
    if just_ran and order[1, at - 1] == q and order[2, at - 1] == i:
        return seconds
    return seconds + pipe.recompute_s[q]


def send_on(row, q, i, free_s, pipe, played):
    """Let what an F, I or B made arrive where it is needed: the place, and when; -1 if at none."""
    if row == FORWARD and (q + 1) % pipe.stages == 0:
        played.arrival_s[action_at(BACKWARD, q, i, pipe)] = free_s
        return -1, free_s
    if row == WEIGHTS or (row == BACKWARD and q % pipe.stages == 0):
        return -1, free_s
    there_s = free_s + pipe.transfer_s[q if row == FORWARD else q - 1]
    there = q + 1 if row == FORWARD else q - 1
    played.arrival_s[action_at(row, there, i, pipe)] = there_s
    return there, there_s


def play_wishes(arrays, policy, state, best_s, order):
    """Fill ``order``, group after group; the makespan, or infinity if not below ``best_s``."""
    pipe, wishes, played = borrowed(arrays), borrowed(policy), borrowed(state)
    groups = len(arrays.limit_bytes)
    leaves = 1
    while leaves < groups:
        leaves *= 2
    wake_s = np.full(2 * leaves, np.inf)
    for g in range(groups):
        set_wake(wake_s, g, 0.0)
    for q in range(0, pipe.places, pipe.stages):
        for i in range(pipe.micro_batches[q]):
            action = action_at(FORWARD, q, i, pipe)
            played.arrival_s[action] = max(0.0, wishes.keys[action] - wishes.lead_s)
    end_s = 0.0
    for _ in range(order.shape[1]):
        q = -1
        while q < 0:
            g = next_group(wake_s)
            now_s = wake_s[1]
            if now_s + played.left_s[g] >= best_s or now_s == np.inf:
                return np.inf
            row, q, later_s = decide(g, now_s, pipe, wishes, played)
            if q < 0:
                set_wake(wake_s, g, later_s)
        i, at = played.done[row * pipe.places + q], played.following[g]
        free_s = now_s + seconds_of(row, q, i, at, pipe, order)
        order[0, at], order[1, at], order[2, at] = row, q, i
        played.following[g] += 1
        played.free_s[g] = free_s
        end_s = max(end_s, free_s)
        account(row, q, pipe, played)
        set_wake(wake_s, g, free_s)
        there, there_s = send_on(row, q, i, free_s, pipe, played)
        if there >= 0:
            h = pipe.group[there]
            there_s = max(there_s, played.free_s[h])
            if h != g and there_s < wake_s[leaves + h]:
                set_wake(wake_s, h, there_s)
    return end_s
