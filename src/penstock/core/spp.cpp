#include "spp.hpp"

namespace penstock {

SppTable::SppTable(const GroupCosts& costs, const Network& network, SppQuestion question)
    : costs_(costs), question_(std::move(question)), transfers_(network) {
  const std::size_t cuts = costs_.cuts(), widths = question_.widths();
  states_.resize(question_.stages * cuts * question_.blocks * widths);
  least_.assign(question_.stages * (question_.blocks + 1) * cuts, kInfinity);
  floor_ = least_;
  round_trip_s_.assign(widths * cuts, 0);
  busier_s_ = round_trip_s_;
  for (int position = question_.blocks - 1; position >= 0; --position) {
    for (int number = 0; number < question_.widths(); ++number) {
      if (question_.groups[position * widths + number] < 0) continue;
      set_moves({position, number});
      for (int k = 1; k < question_.stages; ++k)
        for (int lo = 0; lo < costs_.cuts() - 1; ++lo) extend({position, number}, k, lo);
    }
    for (int k = 1; k < question_.stages; ++k) set_least(k, position);
  }
}

SppState& SppTable::state(int stages, int lo, Window window) {
  const std::size_t place =
      (static_cast<std::size_t>(stages) * costs_.cuts() + lo) * question_.blocks + window.position;
  return states_[place * question_.widths() + window.number];
}

/// Index in `least_` and `floor_` where those of `stages` stages from a block on begin.
std::size_t SppTable::behind(int stages, int position) const {
  const std::size_t row = static_cast<std::size_t>(stages) * (question_.blocks + 1) + position;
  return row * costs_.cuts();
}

void SppTable::set_least(int stages, int position) {
  double lowest = kInfinity;
  for (int lo = 0; lo < costs_.cuts(); ++lo) {
    double& least = least_[behind(stages, position) + lo];
    for (int number = 0; number < question_.widths(); ++number)
      least = std::min(least, state(stages, lo, {position, number}).seconds);
    lowest = std::min(lowest, least);
    floor_[behind(stages, position) + lo] = lowest;
  }
}

/// The seconds from a window to the windows behind it.
void SppTable::set_moves(Window window) {
  const int next = window.position + question_.width[window.number];
  if (next == question_.blocks) return;
  const int own = question_.groups[window.position * question_.widths() + window.number];
  for (int w = 0; w < question_.widths(); ++w) {
    const int other = question_.groups[next * question_.widths() + w];
    if (other < 0) continue;
    transfers_.loads(own, other, down_);
    transfers_.loads(other, own, up_);
    for (int cut = 0; cut < costs_.cuts(); ++cut) {
      const double down_s = Transfers::seconds(down_, costs_.down[cut]);
      const double up_s = Transfers::seconds(up_, costs_.up[cut]);
      round_trip_s_[w * costs_.cuts() + cut] = down_s + up_s;
      busier_s_[w * costs_.cuts() + cut] = std::max(down_s, up_s);
    }
  }
}

/// Seconds of a stage's work in an iteration, without recompute.
double SppTable::least_own_s(const Group& group, Run run) const {
  return costs_.after_s(group, run) + question_.micro_batches * costs_.micro_batch_s(group, run);
}

/// A stage with `stages` stages from itself to the end; infinitely slow if it does not fit.
SppTable::Stage SppTable::stage_of(const Group& group, Run run, int stages) const {
  const int depth = question_.depths[stages];
  const Fit fit = costs_.fit(group, run, depth, question_.recompute);
  if (fit == Fit::too_large) return {run.hi, false, kInfinity, kInfinity};
  double busy_s = costs_.micro_batch_s(group, run);
  if (fit == Fit::recomputes && depth > 1) busy_s += costs_.forward_s(group, run);
  const double own_s = costs_.after_s(group, run) + question_.micro_batches * busy_s;
  return {run.hi, fit == Fit::recomputes, busy_s, own_s};
}

/// Find the best first stage of k on a window, for the layers from a cut on.
///
/// A stage's own seconds never shrink as its end moves up, and the floor of the rest never grows.
/// The search starts at the end where they meet. It goes up until the stage alone takes too long,
/// then down until the rest alone does. Most states have no plan of k stages at all.
void SppTable::extend(Window window, int k, int lo) {
  const Group& group =
      costs_.groups[question_.groups[window.position * question_.widths() + window.number]];
  const int layers = costs_.cuts() - 1;
  SppState& best = state(k, lo, window);
  if (k == 1) {
    const Stage last = stage_of(group, {lo, layers}, 1);
    best = {last.own_s, last.busy_s, last.busy_s, layers, 0, last.recomputes};
    return;
  }
  const int next = window.position + question_.width[window.number];
  const double* least = &least_[behind(k - 1, next)];
  const double* floor = &floor_[behind(k - 1, next)];
  const int first_end = lo + 1, last_end = layers - k + 1;
  if (last_end < first_end || floor[last_end] == kInfinity) return;
  int meeting = first_end;
  for (int high = last_end + 1; meeting < high;) {
    const int middle = (meeting + high) / 2;
    if (least_own_s(group, {lo, middle}) >= floor[middle])
      high = middle;
    else
      meeting = middle + 1;
  }
  const auto try_if_better = [&](int hi) {
    if (least[hi] >= best.seconds) return;
    const Stage stage = stage_of(group, {lo, hi}, k);
    if (stage.busy_s < kInfinity) try_end(best, &state(k - 1, hi, {next, 0}), stage);
  };
  for (int hi = meeting; hi <= last_end && least_own_s(group, {lo, hi}) < best.seconds; ++hi)
    try_if_better(hi);
  for (int hi = meeting - 1; hi >= first_end && floor[hi] < best.seconds; --hi)
    if (least_own_s(group, {lo, hi}) < best.seconds) try_if_better(hi);
}

/// Keep a stage that ends at a cut, with the best window behind it, if that is better.
void SppTable::try_end(SppState& state, const SppState* after, const Stage& stage) {
  const double micro_batches = question_.micro_batches;
  for (int w = 0; w < question_.widths(); ++w) {
    const double moved_s = round_trip_s_[w * costs_.cuts() + stage.end];
    double seconds = std::max(stage.own_s, micro_batches * moved_s);
    seconds = std::max(seconds, after[w].seconds);
    if (question_.drains) {
      const double busier_s = busier_s_[w * costs_.cuts() + stage.end];
      seconds = std::max(stage.own_s, micro_batches * busier_s);
      seconds = std::max(seconds, stage.busy_s + moved_s + after[w].seconds);
    }
    if (seconds >= state.seconds) continue;
    const double slowest_s = std::max({stage.busy_s, moved_s, after[w].slowest_s});
    const double passed_s = stage.busy_s + moved_s + after[w].passed_s;
    state = {seconds, passed_s, slowest_s, stage.end, w, stage.recomputes};
  }
}

}  // namespace penstock
