#include "list_orders.hpp"

#include <algorithm>

namespace penstock {

ListPlay::ListPlay(const ListPipe& pipe, const Wishes& wishes, std::int64_t* order)
    : pipe_(pipe), wishes_(wishes), order_(order), places_(pipe.places.size()),
      arrival_s_(2 * pipe.places.size() * pipe.indices, kNever),
      wake_(static_cast<int>(pipe.work_s.size())) {
  for (std::size_t g = 0; g < pipe.work_s.size(); ++g) {
    groups_.push_back({0, pipe.work_s[g], 0, 0, pipe.order_starts[g]});
    wake_.set(static_cast<int>(g), 0);
  }
  for (std::size_t q = 0; q < pipe.places.size(); q += pipe.stages)
    for (int i = 0; i < pipe.places[q].micro_batches; ++i)
      arrival_s_[pipe.action(kForward, q, i)] = std::max(0.0, key(kForward, q, i) - wishes.lead_s);
}

double ListPlay::run(double best_s) {
  double end_s = 0;
  std::int64_t left = 0;
  for (const Place& place : pipe_.places) left += (pipe_.is_split ? 3 : 2) * place.micro_batches;
  while (left > 0) {
    const double now_s = wake_.next_s();
    if (wake_.empty()) return kNever;
    const int g = wake_.take();
    GroupState& group = groups_[g];
    if (now_s + group.left_s >= best_s) return kNever;
    const Next taken = decide(g, now_s);
    if (taken.place < 0) {
      wake_.set(g, taken.at_s);
      wake_.finish();
      continue;
    }
    const int index = places_[taken.place].done[taken.row];
    const double free_s = now_s + seconds_of(taken, index);
    order_[group.next++] = pipe_.action(taken.row, taken.place, index);
    group.free_s = free_s;
    end_s = std::max(end_s, free_s);
    account(taken);
    wake_.set(g, free_s);
    const int there = send_on(taken, index, free_s);
    if (there >= 0) {
      const int h = pipe_.places[there].group;
      const double there_s =
          std::max(arrival_s_[pipe_.action(taken.row, there, index)], groups_[h].free_s);
      if (h != g && there_s < wake_.of(h)) wake_.set(h, there_s);
    }
    wake_.finish();
    --left;
  }
  return end_s;
}

/// Choose what a group starts now; or no place and the time to decide again.
ListPlay::Next ListPlay::decide(int g, double now_s) const {
  const Choice best = choose(g, now_s);
  const double want_s = best.wanted.at_s;
  const bool wants = best.wanted.place >= 0;
  const bool has_many = groups_[g].pending > wishes_.most_pending;
  if (wants && want_s <= now_s && !best.is_full && !has_many) return best.wanted;
  // Times are sums in different orders: an exact fit may look too long by rounding.
  const double little_s = 1e-9 * (1.0 + now_s);
  if (groups_[g].pending > 0) {
    const int q = next_weights(g);
    const double takes_s = pipe_.places[q].seconds[kWeights];
    const bool fits = now_s + takes_s <= want_s + wishes_.weight_overlap * takes_s + little_s;
    if (has_many || !wants || fits || want_s <= now_s) return {kWeights, q, now_s};
  }
  if (best.ready.place >= 0) {
    const double takes_s = pipe_.places[best.ready.place].seconds[best.ready.row];
    if (now_s + takes_s <= want_s + wishes_.overlap * takes_s + little_s) return best.ready;
  }
  return {kForward, -1, best.arrival_s};
}

/// An action that cannot start yet has its key raised by its waiting time times the idle price.
ListPlay::Choice ListPlay::choose(int g, double now_s) const {
  Choice best;
  double wanted_key = kNever, ready_key = kNever;
  const GroupState& group = groups_[g];
  for (const int q : pipe_.members[g]) {
    const Place& place = pipe_.places[q];
    const auto& done = places_[q].done;
    for (const ListRow row : {kBackward, kForward}) {
      const int i = done[row];
      if (row == kBackward ? i >= done[kForward]
                           : i >= place.micro_batches || i - done[kBackward] >= wishes_.depth[q])
        continue;
      const std::int64_t action = pipe_.action(row, q, i);
      const double at_s = std::max(now_s, arrival_s_[action]);
      if (at_s == kNever) continue;
      double key = wishes_.keys[action] + wishes_.idle_price * (at_s - now_s);
      if (row == kForward) key += wishes_.forward_delay_s;
      if (key >= wanted_key && (key >= ready_key || at_s > now_s)) continue;
      bool is_full = false;
      if (row == kForward) {
        is_full = i - done[kWeights] >= place.limit ||
                  group.used_bytes + place.saved_bytes > pipe_.limit_bytes[g];
        if ((is_full && group.pending == 0) || !leaves_room(q)) continue;
      }
      if (at_s > now_s) best.arrival_s = std::min(best.arrival_s, at_s);
      if (key < wanted_key) {
        wanted_key = key;
        best.wanted = {row, q, at_s};
        best.is_full = is_full;
      }
      if (key < ready_key && at_s <= now_s && !is_full) {
        ready_key = key;
        best.ready = {row, q, now_s};
      }
    }
  }
  return best;
}

/// Return whether all older micro-batches still fit one after the other after a forward on a place.
bool ListPlay::leaves_room(int q) const {
  const int g = pipe_.places[q].group;
  const double limit_bytes = pipe_.limit_bytes[g];
  if (limit_bytes == kNever) return true;
  const int added = pipe_.micro_batch(q, places_[q].done[kForward]);
  for (const int other : pipe_.members[g]) {
    const int oldest = pipe_.micro_batch(other, places_[other].done[kForward]);
    if (oldest >= added) continue;
    double total = pipe_.places[q].saved_bytes;
    for (const int c : pipe_.members[g]) {
      const Place& place = pipe_.places[c];
      const auto& done = places_[c].done;
      const int older = (oldest - place.direction + pipe_.directions - 1) / pipe_.directions;
      total += place.saved_bytes * std::max(0, done[kForward] - std::max(older, done[kBackward]));
      if (pipe_.micro_batch(c, done[kForward]) <= oldest &&
          place.direction == pipe_.places[other].direction)
        total += place.saved_bytes;
    }
    if (total > limit_bytes) return false;
  }
  return true;
}

/// The place of a group whose pending W has the least key; some W must be pending.
int ListPlay::next_weights(int g) const {
  int found = -1;
  double least = kNever;
  for (const int q : pipe_.members[g]) {
    const auto& done = places_[q].done;
    if (done[kWeights] >= done[kBackward]) continue;
    const double own = key(kWeights, q, done[kWeights]);
    if (found < 0 || own < least) {
      least = own;
      found = q;
    }
  }
  return found;
}

/// Seconds of an action, with recomputation unless its forward has just ended.
double ListPlay::seconds_of(const Next& taken, int index) const {
  const Place& place = pipe_.places[taken.place];
  const double seconds = place.seconds[taken.row];
  if (taken.row != kBackward || place.recompute_s == 0) return seconds;
  const std::int64_t at = groups_[place.group].next;
  if (at > pipe_.order_starts[place.group] &&
      order_[at - 1] == pipe_.action(kForward, taken.place, index))
    return seconds;
  return seconds + place.recompute_s;
}

/// Count an action as done, and update the bytes in use.
void ListPlay::account(const Next& taken) {
  const Place& place = pipe_.places[taken.place];
  GroupState& group = groups_[place.group];
  ++places_[taken.place].done[taken.row];
  group.left_s -= place.seconds[taken.row];
  if (taken.row == kForward) {
    group.used_bytes += place.saved_bytes;
  } else if (taken.row == kWeights) {
    group.used_bytes -= place.kept_bytes;
    --group.pending;
  } else if (pipe_.is_split) {
    group.used_bytes -= place.saved_bytes - place.kept_bytes;
    ++group.pending;
  } else {
    group.used_bytes -= place.saved_bytes;
    ++places_[taken.place].done[kWeights];
  }
}

/// Let what an F, I or B made arrive where it is needed; returns the other place, or -1.
int ListPlay::send_on(const Next& taken, int index, double free_s) {
  const int q = taken.place;
  const int first = q % pipe_.stages == 0, last = (q + 1) % pipe_.stages == 0;
  if (taken.row == kForward && last) arrival_s_[pipe_.action(kBackward, q, index)] = free_s;
  if (taken.row == kWeights || (taken.row == kForward ? last : first)) return -1;
  const int there = taken.row == kForward ? q + 1 : q - 1;
  arrival_s_[pipe_.action(taken.row, there, index)] =
      free_s + pipe_.places[std::min(q, there)].transfer_s;
  return there;
}

}  // namespace penstock
