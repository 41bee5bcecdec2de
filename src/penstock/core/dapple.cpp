#include "dapple.hpp"

#include <algorithm>

namespace penstock {

int pivot_of(const Column* columns, int count, int micro_batches) {
  const int steady = micro_batches - 1;
  int pivot = count - 1;
  double between_s = 0;
  for (int stage = count - 2; stage >= 0; --stage) {
    const double own_s = columns[stage].both_s();
    if (steady * own_s > steady * columns[pivot].both_s() + between_s) {
      pivot = stage;
      between_s = 0;
    } else {
      between_s += own_s;
    }
  }
  return pivot;
}

double latency_s(const Column* columns, int count, int micro_batches) {
  const int pivot = pivot_of(columns, count, micro_batches);
  double warm_up_s = 0, ended_s = 0, ending_s = 0, started_s = 0, round_trip_s = 0;
  for (int stage = 0; stage <= pivot; ++stage) warm_up_s += columns[stage].forward_s;
  for (int stage = pivot; stage >= 0; --stage) {
    ended_s += columns[stage].backward_s;
    ending_s = std::max(ending_s, ended_s + columns[stage].after_s);
  }
  for (int stage = pivot + 1; stage < count; ++stage) {
    ending_s = std::max(ending_s, columns[stage].after_s - started_s);
    started_s += columns[stage].backward_s;
    round_trip_s += columns[stage].both_s();
  }
  const int ahead = std::min(count - pivot, micro_batches) - 1;
  const double gap_s = std::max(0.0, round_trip_s - ahead * columns[pivot].forward_s);
  const double steady_s = (micro_batches - 1) * columns[pivot].both_s();
  return warm_up_s + gap_s + steady_s + ending_s;
}

namespace {

class Search {
 public:
  Search(const GroupCosts& costs, const Network& network, const DappleQuestion& question,
         double limit_s)
      : costs_(costs), question_(question), transfers_(network), best_s_(limit_s) {
    const std::size_t steps = question_.steps.size(), cuts = costs_.cuts();
    for (int place = 0; place < places(); ++place)
      widest_ = std::max(widest_, question_.places[place + 1].first_step - first_step(place));
    memo_.resize(cuts * places());
    columns_.resize(2 * question_.most_stages + 1);
    known_.assign(steps, false);
    rest_moves_.resize(steps * cuts);
    pairs_.resize(std::min<std::size_t>(kMostPairs, steps * widest_));
  }

  /// Try all prefixes, from no layers to all of them.
  DapplePlan plan() {
    memo_[0].known = true;
    memo_[0].fits = true;
    for (int cut = 0; cut < costs_.cuts() - 1; ++cut)
      for (int place = 0; place < places(); ++place)
        if (prefix(cut, place).known && prefix(cut, place).stages + 2 <= question_.most_stages)
          expand(cut, place);
    DapplePlan found{best_s_, {}};
    for (Taken taken = best_; taken.step >= 0;) {
      found.steps.insert(found.steps.begin(), taken);
      const int end = taken.cut;
      const Prefix& before = prefix(taken.cut, taken.place);
      taken = end > 0 ? Taken{before.cut, before.place, before.step, end} : Taken{};
    }
    return found;
  }

 private:
  static constexpr std::size_t kMostPairs = 1 << 16;  // steps whose transfers are remembered

  /// The best prefix of a state: the state before its last step; how many stages it has; seconds of
  /// the plan by which it was compared, and whether that fits.
  struct Prefix {
    int cut = -1, place = -1, step = -1, stages = 0;
    double seconds = kInfinity;
    bool known = false, fits = false;
  };

  /// Seconds of the transfers at a cut: of activations, and of their gradients.
  struct Move {
    double down_s, up_s;
  };

  struct PairLoads {
    std::size_t owner = SIZE_MAX;
    std::vector<MessageLoad> down = {}, up = {};
  };

  /// The columns of a prefix: their sum, and the slowest of them.
  struct Passed {
    double whole_s = 0, slowest_s = 0;
  };

  /// A next stage behind a prefix.
  struct Next {
    int cut, place, step, column;
  };

  int places() const { return static_cast<int>(question_.places.size()) - 1; }
  int steps() const { return static_cast<int>(question_.steps.size()); }
  int first_step(int place) const { return question_.places[place].first_step; }
  Prefix& prefix(int cut, int place) { return memo_[cut * places() + place]; }

  /// Try every next stage behind one prefix, with one last stage behind it.
  void expand(int cut, int place) {
    const int columns = first_stages(cut, place);
    if (columns < 0 || bound_s(columns, rest_s(cut, place)) >= best_s_) return;
    Passed before;
    for (int k = 0; k < columns; ++k) {
      before.whole_s += columns_[k].both_s();
      before.slowest_s = std::max(before.slowest_s, columns_[k].both_s());
    }
    const int own = columns ? columns + 1 : 0;
    for (int step = first_step(place); step < first_step(place + 1); ++step) {
      if (question_.steps[step].group < 0) continue;
      Passed passed = before;
      if (columns) {
        put_move(prefix(cut, place).step, step, cut, own - 1);
        passed.whole_s += columns_[own - 1].both_s();
        passed.slowest_s = std::max(passed.slowest_s, columns_[own - 1].both_s());
      }
      if (!known_[step]) put_rest_moves(step);
      try_step({cut, place, step, own}, passed);
    }
  }

  /// Least seconds of the layers behind a cut on the devices that an occupancy leaves.
  double rest_s(int cut, int place) const {
    const double left_s = (question_.least_s.back() - question_.least_s[cut]) * question_.size;
    return left_s / question_.places[place].speed_left;
  }

  /// A lower bound of the closed form for all plans with these first columns.
  ///
  /// `rest_s` are the least seconds of the slowest later stage. If the pivot lies behind these
  /// stages, all of them count in the warm-up and ending phases. If it is one of them, no later
  /// stage is slower.
  double bound_s(int columns, double rest_s) const {
    const int steady = question_.micro_batches - 1;
    double passed_s = 0, least_s = 0;
    for (int s = 0; s < columns; ++s) {
      passed_s += columns_[s].both_s();
      least_s = std::max(least_s, passed_s + steady * columns_[s].both_s());
    }
    const double whole_s = passed_s + rest_s;
    double bound = std::max(least_s, passed_s + steady * rest_s), slowest_s = rest_s;
    for (int q = columns - 1; q >= 0; --q) {
      slowest_s = std::max(slowest_s, columns_[q].both_s());
      bound = std::min(bound, passed_s + steady * slowest_s);
      passed_s -= columns_[q].both_s();
    }
    // Warm-up, gap and ending phase together are a round trip of one micro-batch at least.
    return std::max(bound, whole_s);
  }

  /// Put the stages of a prefix, with two more behind them, into their columns; returns how many
  /// columns they take, or -1 where a stage does not fit.
  int first_stages(int cut, int place) {
    const int count = prefix(cut, place).stages;
    int hi = cut, following = -1;
    for (int stage = count - 1; stage >= 0; --stage) {
      const Prefix& last = prefix(hi, place);
      const int group = question_.steps[last.step].group, behind = count + 2 - stage;
      put_stage(group, {last.cut, hi}, behind, 2 * stage);
      if (!fit_stage(group, {last.cut, hi}, behind, 2 * stage)) return -1;
      if (following >= 0) put_move(last.step, following, hi, 2 * stage + 1);
      following = last.step;
      hi = last.cut;
      place = last.place;
    }
    return std::max(2 * count - 1, 0);
  }

  /// Put a stage into a column, with recompute only if all stages recompute; see `fit_stage`.
  void put_stage(int number, Run run, int behind, int column) {
    const Group& group = costs_.groups[number];
    const double forward_s = costs_.forward_s(group, run);
    double backward_s = costs_.backward_s(group, run);
    if (question_.recompute == RecomputeChoice::all && question_.depths[behind] > 1)
      backward_s += forward_s;
    columns_[column] = {forward_s, backward_s, costs_.after_s(group, run)};
  }

  /// Return whether a stage of `put_stage` fits. If it must recompute, add that to its column.
  bool fit_stage(int number, Run run, int behind, int column) {
    const int depth = question_.depths[behind];
    const Fit fit = costs_.fit(costs_.groups[number], run, depth, question_.recompute);
    const bool by_itself = question_.recompute == RecomputeChoice::where_needed;
    if (fit == Fit::recomputes && by_itself && depth > 1)
      columns_[column].backward_s += columns_[column].forward_s;
    return fit != Fit::too_large;
  }

  Move move_at(const PairLoads& loads, int cut) const {
    return {Transfers::seconds(loads.down, costs_.down[cut]),
            Transfers::seconds(loads.up, costs_.up[cut])};
  }

  /// The transfers there and back between two groups of the network.
  void put_loads(PairLoads& loads, int sender, int receiver) {
    transfers_.loads(sender, receiver, loads.down);
    transfers_.loads(receiver, sender, loads.up);
  }

  /// Put the transfers at a cut between the stages of two consecutive steps into a column.
  void put_move(int before, int step, int cut, int column) {
    const std::size_t number = step - first_step(question_.steps[before].target);
    const std::size_t pair = static_cast<std::size_t>(before) * widest_ + number;
    PairLoads& loads = pairs_[pair % pairs_.size()];
    if (loads.owner != pair) {
      loads.owner = pair;
      put_loads(loads, before, steps() + step);
    }
    const auto [down_s, up_s] = move_at(loads, cut);
    columns_[column] = {down_s, up_s, 0};
  }

  /// The transfers at every cut from a step's stage to a last stage behind it.
  void put_rest_moves(int step) {
    put_loads(rest_loads_, step, 2 * steps() + question_.steps[step].target);
    for (int cut = 0; cut < costs_.cuts(); ++cut)
      rest_moves_[step * costs_.cuts() + cut] = move_at(rest_loads_, cut);
    known_[step] = true;
  }

  /// Try every end of a next stage behind a prefix.
  void try_step(Next next, Passed passed) {
    const int steady = question_.micro_batches - 1;
    const auto [target, group] = question_.steps[next.step];
    for (int hi = next.cut + 1; hi < costs_.cuts() - 1; ++hi) {
      const double left_s = rest_s(hi, target);
      if (steady * left_s >= best_s_) continue;
      put_stage(group, {next.cut, hi}, 2, next.column);
      const double own_s = columns_[next.column].both_s();
      const double slowest_s = std::max(passed.slowest_s, own_s);
      if (std::max(passed.whole_s + own_s, slowest_s * steady) >= best_s_) break;
      const double least_s = columns_[0].both_s() + steady * std::max(slowest_s, left_s);
      if (std::max(passed.whole_s + own_s + left_s, least_s) >= best_s_) continue;
      const auto [down_s, up_s] = rest_moves_[next.step * costs_.cuts() + hi];
      columns_[next.column + 1] = {down_s, up_s, 0};
      try_last_stage(next, hi, passed);
    }
  }

  /// Compare a prefix (the first columns) with a next stage and one last stage behind it.
  void try_last_stage(Next next, int hi, Passed passed) {
    const auto [target, group] = question_.steps[next.step];
    const int rest = question_.places[target].rest_group, last = next.column + 2;
    const double idle = question_.places[target].idle;
    const Run rest_run{hi, costs_.cuts() - 1};
    Prefix& known = prefix(hi, target);
    put_stage(rest, rest_run, 1, last);
    const double known_s = known.fits ? known.seconds : kInfinity;
    if (idle <= 1 && least_plan_s(next.column, passed) >= std::max(known_s, best_s_)) return;
    double seconds = plan_s(last + 1);
    if (known_s <= compared_s(last, idle, seconds) && seconds >= best_s_) return;
    if (!fit_stage(group, {next.cut, hi}, 2, next.column)) return;
    const bool fits = fit_stage(rest, rest_run, 1, last);
    seconds = plan_s(last + 1);
    if (fits && seconds < best_s_) {
      best_s_ = seconds;
      best_ = {next.cut, next.place, next.step, hi};
    }
    const double judged_s = compared_s(last, idle, seconds);
    // A plan that fits is better than one that does not; then the least seconds count.
    const bool better = fits == known.fits ? judged_s < known.seconds : fits;
    if (!known.known || better)
      known = {next.cut, next.place, next.step, prefix(next.cut, next.place).stages + 1,
               judged_s, true, fits};
  }

  /// A lower bound of the closed form: a round trip, or the steady phase of the slowest column.
  double least_plan_s(int own, Passed passed) const {
    for (int k = own; k < own + 3; ++k) {
      passed.whole_s += columns_[k].both_s();
      passed.slowest_s = std::max(passed.slowest_s, columns_[k].both_s());
    }
    const double steady_s = (question_.micro_batches - 1) * passed.slowest_s;
    return std::max(passed.whole_s, columns_[0].both_s() + steady_s);
  }

  double plan_s(int columns) const {
    return latency_s(columns_.data(), columns, question_.micro_batches);
  }

  /// Seconds by which a prefix is compared: as if rows were enough for all devices left.
  double compared_s(int column, double idle, double seconds) {
    if (idle <= 1) return seconds;
    const Column kept = columns_[column];
    columns_[column].forward_s /= idle;
    columns_[column].backward_s /= idle;
    seconds = plan_s(column + 1);
    columns_[column] = kept;
    return seconds;
  }

  const GroupCosts& costs_;
  const DappleQuestion& question_;
  Transfers transfers_;
  double best_s_;
  Taken best_;
  int widest_ = 1;
  std::vector<Prefix> memo_;  // by cut and place
  std::vector<Column> columns_;
  std::vector<char> known_;       // by step: whether its moves to a last stage are
  std::vector<Move> rest_moves_;  // by step and cut
  std::vector<PairLoads> pairs_;
  PairLoads rest_loads_;
};

}  // namespace

DapplePlan dapple_plan(const GroupCosts& costs, const Network& network,
                       const DappleQuestion& question, double limit_s) {
  return Search(costs, network, question, limit_s).plan();
}

}  // namespace penstock
