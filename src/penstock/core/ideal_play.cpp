#include "ideal_play.hpp"

#include <algorithm>

#include "events.hpp"

namespace penstock {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

/// The ends of what others wait for.
class Ends {
 public:
  explicit Ends(const IdealPipe& pipe)
      : pipe_(pipe), forward_s_(pipe.cells(), kNever), gradient_s_(pipe.cells(), kNever),
        again_s_(pipe.cells(), -kNever) {}

  /// Let the backward of a cell wait until its forward has run again.
  void expect_again(int cell) { again_s_[cell] = kNever; }

  /// Time at which what an action needs is there; infinite while that is not known.
  double ready_s(Pass kind, int cell) const {
    const int stage = pipe_.stage(cell), each = pipe_.micro_batches;
    if (kind == Pass::forward)
      return stage > 0 ? forward_s_[cell - each] + pipe_.transfer_s[stage - 1] : 0;
    if (kind == Pass::weight) return gradient_s_[cell];
    if (kind == Pass::again) return forward_s_[cell];
    const double here_s = std::max(forward_s_[cell], again_s_[cell]);
    if (stage + 1 == pipe_.stages) return here_s;
    return std::max(here_s, gradient_s_[cell + each] + pipe_.transfer_s[stage]);
  }

  void set(Pass kind, int cell, double end_s) {
    if (kind == Pass::weight) return;
    (kind == Pass::forward ? forward_s_ : kind == Pass::again ? again_s_ : gradient_s_)[cell] =
        end_s;
  }

 private:
  const IdealPipe& pipe_;
  std::vector<double> forward_s_, gradient_s_, again_s_;
};

/// Orders that are played one after the other, each as far as it can be for the time being.
struct FixedOrders {
  FixedOrders(const IdealPipe& costs, const std::vector<int>& starts, Codes codes)
      : pipe(costs), first(starts), actions(codes), ends(pipe), reached(first.begin(), first.end()),
        free_s(first.size() - 1), home{std::vector<int>(pipe.cells(), -1), home[0]} {
    reached.pop_back();
    for (int k = 0; k < size(); ++k) {
      for (int i = first[k]; i < first[k + 1]; ++i) {
        const Pass kind = pipe.kind(actions[i]);
        if (kind == Pass::again) ends.expect_again(pipe.cell(actions[i]));
        if (kind <= Pass::input) home[kind != Pass::forward][pipe.cell(actions[i])] = k;
      }
    }
  }

  int size() const { return static_cast<int>(free_s.size()); }
  bool all_over() const { return std::equal(reached.begin(), reached.end(), first.begin() + 1); }

  /// Play as far as possible. `before` is called with the order, the index of its action and when
  /// that is ready; nothing is played any more once it returns false.
  void play(auto&& before) {
    std::vector<int> todo(size());
    for (int k = 0; k < size(); ++k) todo[k] = k;
    const auto wake = [&](bool gradient, int cell) {
      if (home[gradient][cell] >= 0) todo.push_back(home[gradient][cell]);
    };
    while (!todo.empty()) {
      const int k = todo.back();
      todo.pop_back();
      for (; reached[k] < first[k + 1]; ++reached[k]) {
        const Pass kind = pipe.kind(actions[reached[k]]);
        const int cell = pipe.cell(actions[reached[k]]), stage = pipe.stage(cell);
        const double ready_s = ends.ready_s(kind, cell);
        if (ready_s == kNever) break;
        if (!before(k, reached[k], ready_s)) return;
        free_s[k] = std::max(free_s[k], ready_s) + pipe.seconds_of(kind, cell);
        ends.set(kind, cell, free_s[k]);
        if (kind == Pass::forward) {
          wake(true, cell);
          if (stage + 1 < pipe.stages) wake(false, cell + pipe.micro_batches);
        } else if (kind <= Pass::input && stage > 0) {
          wake(true, cell - pipe.micro_batches);
        }
      }
    }
  }

  const IdealPipe& pipe;
  const std::vector<int>& first;
  const Codes actions;
  Ends ends;
  std::vector<int> reached;
  std::vector<double> free_s;  // by order: the end of its last action
  std::vector<int> home[2];    // of each cell: the orders of its F, and of its B or I
};

/// Micro-batches and bytes of a group, with the cells that wait for their W, oldest first.
struct Held {
  int micro_batches = 0;
  double bytes = 0, bytes_on_the_way_down = 0;
  std::size_t next_weight = 0;
  std::vector<int> waiting = {};

  bool any_waits() const { return next_weight < waiting.size(); }
};

/// Micro-batches and bytes of all groups.
class Load {
 public:
  Load(const IdealPipe& pipe, const HeldLimits& limits)
      : groups(limits.memory.size()), pipe_(pipe), limits_(limits), in_flight_(pipe.stages) {}

  /// Return whether a forward would exceed a limit.
  bool is_full(int cell) const {
    const int s = pipe_.stage(cell), g = limits_.group[s];
    return groups[g].micro_batches + 1 > limits_.most || in_flight_[s] + 1 > limits_.in_flight[s] ||
           groups[g].bytes + limits_.saved[s] > limits_.memory[g];
  }

  /// Return whether a forward on the way down would leave no room for one on the way up.
  bool takes_the_way_up(int cell) const {
    const int s = pipe_.stage(cell), g = limits_.group[s];
    return is_on_the_way_down(s) && groups[g].bytes_on_the_way_down + limits_.saved[s] +
                                            limits_.saved[pipe_.stages - 1 - s] >
                                        limits_.memory[g];
  }

  bool is_on_the_way_down(int stage) const { return 2 * stage < pipe_.stages; }

  /// Count F or I as done.
  void take_in(bool forward, int cell) {
    const int s = pipe_.stage(cell);
    Held& group = groups[limits_.group[s]];
    change(group, s, forward ? limits_.saved[s] : limits_.kept[s] - limits_.saved[s]);
    if (!forward) group.waiting.push_back(cell);
    group.micro_batches += forward;
    in_flight_[s] += forward;
  }

  /// Count the oldest pending W of a group as done.
  void let_go(Held& group) {
    const int s = pipe_.stage(group.waiting[group.next_weight++]);
    change(group, s, -limits_.kept[s]);
    --group.micro_batches;
    --in_flight_[s];
  }

  double weight_s(const Held& group) const {
    return pipe_.seconds_of(Pass::weight, group.waiting[group.next_weight]);
  }

  std::vector<Held> groups;

 private:
  void change(Held& group, int stage, double bytes) {
    group.bytes += bytes;
    if (is_on_the_way_down(stage)) group.bytes_on_the_way_down += bytes;
  }

  const IdealPipe& pipe_;
  const HeldLimits& limits_;
  std::vector<int> in_flight_;
};

/// Makes the orders of `rearrange`, event by event.
class Rearranging {
 public:
  Rearranging(const IdealPipe& pipe, const HeldLimits& limits, const Ranking& ranks, double slack_s)
      : pipe_(pipe), ranks_(ranks), slack_s_(slack_s), load_(pipe, limits), ends_(pipe),
        done_{std::vector<int>(pipe.stages), done_[0]}, is_idle_(pipe.stages / 2) {}

  void run(std::int64_t* out) {
    const int groups = pipe_.stages / 2;
    std::vector<std::int64_t*> next(groups);
    Events look(groups);  // when each group looks for work
    for (int g = 0; g < groups; ++g) {
      look.set(g, 0);
      next[g] = out + 4 * pipe_.micro_batches * g;
    }
    while (!look.empty()) {
      const double now_s = look.next_s();
      const int g = look.take();
      Held& held = load_.groups[g];
      Choice best = choice(now_s + slack_s_, g);
      if (best.rank == kNever && held.any_waits())
        best.needs_weight = !ranks_.patient || now_s + load_.weight_s(held) <= best.wake_s + slack_s_;
      is_idle_[g] = best.rank == kNever && !best.needs_weight;
      if (is_idle_[g]) {
        look.set(g, best.wake_s);
      } else if (best.needs_weight) {
        look.set(g, now_s + load_.weight_s(held));
        load_.let_go(held);
      } else {
        *next[g]++ = pipe_.action(best.forward ? Pass::forward : Pass::input, best.cell);
        start(best, g, now_s, look);
      }
      look.finish();
    }
  }

 private:
  /// Next action of a group, or that a W must run first; and the first time of the others.
  struct Choice {
    bool forward = false, needs_weight = false;
    int cell = -1;
    double rank = kNever, wake_s = kNever;
  };

  Choice choice(double now_s, int g) const {
    Choice best;
    for (const bool forward : {true, false}) {
      for (const int stage : {g, pipe_.stages - 1 - g}) {
        const int number = done_[!forward][stage];
        if (number == pipe_.micro_batches) continue;
        if (forward && load_.is_on_the_way_down(stage) &&
            number - done_[1][stage] >= ranks_.deepest[g])
          continue;
        const int cell = stage * pipe_.micro_batches + number;
        const double ready_s = ends_.ready_s(forward ? Pass::forward : Pass::input, cell);
        const auto rank = static_cast<double>((forward ? ranks_.forward : ranks_.input)[cell]);
        if (ready_s > now_s) {
          best.wake_s = std::min(best.wake_s, ready_s);
        } else if (rank < best.rank) {
          const bool waits = forward && (load_.is_full(cell) || load_.takes_the_way_up(cell));
          if (!waits || load_.groups[g].any_waits())
            best = {forward, waits, cell, rank, best.wake_s};
        }
      }
    }
    return best;
  }

  void start(const Choice& best, int g, double now_s, Events& look) {
    const Pass kind = best.forward ? Pass::forward : Pass::input;
    const int stage = pipe_.stage(best.cell);
    ++done_[!best.forward][stage];
    const double end_s = now_s + pipe_.seconds_of(kind, best.cell);
    ends_.set(kind, best.cell, end_s);
    look.set(g, end_s);
    load_.take_in(best.forward, best.cell);
    const int neighbour = best.forward ? stage + 1 : stage - 1;
    if (neighbour < 0 || neighbour == pipe_.stages) return;
    const int there = std::min(neighbour, pipe_.stages - 1 - neighbour);
    const double arrives_s = end_s + pipe_.transfer_s[std::min(stage, neighbour)];
    if (there != g && is_idle_[there] && arrives_s < look.of(there)) look.set(there, arrives_s);
  }

  const IdealPipe& pipe_;
  const Ranking& ranks_;
  const double slack_s_;
  Load load_;
  Ends ends_;
  std::vector<int> done_[2];  // of each stage: F, and I
  std::vector<bool> is_idle_;
};

}  // namespace

std::vector<int> play_orders(const IdealPipe& pipe, const std::vector<int>& first, Codes actions,
                             double* start_s) {
  FixedOrders orders(pipe, first, actions);
  orders.play([&](int k, int i, double ready_s) {
    start_s[i] = std::max(orders.free_s[k], ready_s);
    return true;
  });
  return orders.reached;
}

double fill_gaps(const IdealPipe& pipe, const HeldLimits& limits, const std::vector<int>& first,
                 Codes actions, double slack_s, std::int64_t* out) {
  FixedOrders orders(pipe, first, actions);
  Load load(pipe, limits);
  std::vector<std::int64_t*> next;
  for (int g = 0; g < orders.size(); ++g) next.push_back(out + 3 * first[g] / 2);
  const auto run_weight = [&](int g) {
    Held& held = load.groups[g];
    *next[g]++ = pipe.action(Pass::weight, held.waiting[held.next_weight]);
    orders.free_s[g] += load.weight_s(held);
    load.let_go(held);
  };
  orders.play([&](int g, int i, double ready_s) {
    const bool forward = pipe.kind(actions[i]) == Pass::forward;
    const int cell = pipe.cell(actions[i]);
    const Held& held = load.groups[g];
    while (held.any_waits() && ((forward && load.is_full(cell)) ||
                                orders.free_s[g] + load.weight_s(held) <= ready_s + slack_s))
      run_weight(g);
    if (forward && load.is_full(cell)) return false;
    *next[g]++ = actions[i];
    load.take_in(forward, cell);
    return true;
  });
  if (!orders.all_over()) return kNever;
  for (int g = 0; g < orders.size(); ++g)
    while (load.groups[g].any_waits()) run_weight(g);
  return *std::max_element(orders.free_s.begin(), orders.free_s.end());
}

void rearrange(const IdealPipe& pipe, const HeldLimits& limits, const Ranking& ranks,
               double slack_s, std::int64_t* out) {
  Rearranging(pipe, limits, ranks, slack_s).run(out);
}

}  // namespace penstock
