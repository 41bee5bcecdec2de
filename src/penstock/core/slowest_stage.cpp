#include "slowest_stage.hpp"

namespace penstock {

SlowestStageTable::SlowestStageTable(const GroupCosts& costs, SlowestStageQuestion question)
    : costs_(costs), question_(std::move(question)) {
  states_.resize(static_cast<std::size_t>(question_.blocks + 1) * cuts());
  states_.back().seconds = states_.back().floor = 0;
  const int widths = static_cast<int>(question_.width.size());
  for (int position = question_.blocks - 1; position >= 0; --position) {
    for (int number = 0; number < widths; ++number)
      if (question_.windows[position * widths + number].group >= 0)
        for (int lo = 0; lo < cuts() - 1; ++lo) extend(position, number, lo);
    double lowest = kInfinity;
    for (int lo = 0; lo < cuts(); ++lo) {
      SlowestStageState& state = states_[position * cuts() + lo];
      state.floor = lowest = std::min(lowest, state.seconds);
    }
  }
}

/// Let a window hold the first stage of the layers from a cut on, where that is better.
///
/// The stage's computing never shrinks as its end moves up, and the floor of the rest never grows.
/// The search starts at the first end where the rest may be better, and goes up until computing
/// takes too long. If `balanced`, it starts where both meet, and also goes down until the rest
/// takes too long.
void SlowestStageTable::extend(int position, int number, int lo) {
  const WindowLoad& window = question_.windows[position * question_.width.size() + number];
  const Group& group = costs_.groups[window.group];
  SlowestStageState& best = states_[position * cuts() + lo];
  const SlowestStageState* rest = &states_[(position + question_.width[number]) * cuts()];
  int first = lo + 1;
  for (int high = cuts(); first < high;) {
    const int middle = (first + high) / 2;
    const double rest_s = rest[middle].floor;
    const double least_s =
        question_.balanced ? costs_.micro_batch_s(group, {lo, middle}) : best.seconds;
    if (rest_s < least_s || (question_.balanced && rest_s == least_s))
      high = middle;
    else
      first = middle + 1;
  }
  for (int hi = first; hi < cuts(); ++hi) {
    if (costs_.micro_batch_s(group, {lo, hi}) >= best.seconds) break;
    try_end(best, rest, number, {lo, hi}, window);
  }
  if (!question_.balanced) return;
  for (int hi = first - 1; hi > lo && rest[hi].floor < best.seconds; --hi)
    try_end(best, rest, number, {lo, hi}, window);
}

/// Keep a stage if it is better; of equal ones, the one tried first.
void SlowestStageTable::try_end(SlowestStageState& best, const SlowestStageState* rest, int number,
                                Run run, const WindowLoad& window) {
  const Group& group = costs_.groups[window.group];
  const double rest_s = rest[run.hi].seconds;
  double moved_s = window.before_s_per_byte * question_.crossing_bytes[run.lo];
  moved_s += window.after_s_per_byte * question_.crossing_bytes[run.hi];
  double beside_s = 2 * moved_s / window.replicas;
  beside_s += window.parameter_s_per_byte * costs_.parameter_bytes[run];
  double computing_s = costs_.micro_batch_s(group, run);
  if (std::max(computing_s + beside_s, rest_s) >= best.seconds) return;
  const Fit fit = costs_.fit(group, run, window.depth, question_.recompute);
  if (fit == Fit::too_large) return;
  if (fit == Fit::recomputes && window.depth > 1) computing_s += costs_.forward_s(group, run);
  const double seconds = std::max(beside_s + computing_s, rest_s);
  if (seconds < best.seconds) {
    best.seconds = seconds;
    best.end = run.hi;
    best.number = number;
  }
}

}  // namespace penstock
