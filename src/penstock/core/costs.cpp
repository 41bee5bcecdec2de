#include "costs.hpp"

namespace penstock {
namespace {

/// The longest time that a replica reads parameters in an action.
double longest_read_s(const Group& group, double parameter_bytes) {
  double longest_s = 0;
  for (const ReplicaKind& kind : group.kinds)
    longest_s = std::max(longest_s, kind.chip.read_s(parameter_bytes));
  return longest_s;
}

}  // namespace

double Group::all_reduce_s(double bytes) const {
  double least_s = kInfinity;
  for (const ReduceCost& cost : all_reduces) least_s = std::min(least_s, cost.of(bytes));
  return least_s;
}

double Group::slowest_s(Affine seconds) const {
  double longest_s = 0;
  for (const ReplicaKind& kind : kinds)
    longest_s = std::max(longest_s, seconds.at(kind.rows) / kind.speed);
  return longest_s;
}

double LayerSums::norms_s(const Group& group, Run run, bool forward) const {
  const auto [count, channels] = norms[run.hi] - norms[run.lo];
  if (count <= 0 || group.replicas < 2) return 0;
  double bytes = 2 * channels / count * rules.statistic_bytes;
  if (forward) bytes = group.replicas * (bytes + rules.statistic_bytes);
  const double sums_s = count * (rules.statistics_s + group.all_reduce_s(bytes));
  return again && !forward ? sums_s + norms_s(group, run, true) : sums_s;
}

double RunCosts::pass_s(const Group& group, Run run, bool is_forward) const {
  const std::vector<Affine>& sums = is_forward ? forward : backward;
  const double read_s = longest_read_s(group, parameter_bytes[run]);
  if (!gathers || group.replicas < 2)
    return std::max(read_s, group.slowest_s(sums[run.hi] - sums[run.lo]));
  const auto bytes_up_to = [&](int cut) { return parameter_bytes[{run.lo, cut}]; };
  return std::max(read_s, gathered_s(group, run, is_forward, bytes_up_to));
}

double RunCosts::forward_s(const Group& group, Run run) const {
  return (pass_s(group, run, true) + norms_s(group, run, true)) * group.crowding;
}

double RunCosts::backward_s(const Group& group, Run run) const {
  return (pass_s(group, run, false) + norms_s(group, run, false)) * group.crowding;
}

double RunCosts::micro_batch_s(const Group& group, Run run) const {
  const bool reads = longest_read_s(group, parameter_bytes[run]) > 0;
  if (reads || (gathers && group.replicas > 1))
    return forward_s(group, run) + backward_s(group, run);
  const Affine seconds = forward[run.hi] - forward[run.lo] + backward[run.hi] - backward[run.lo];
  double longest_s = group.slowest_s(seconds);
  longest_s += norms_s(group, run, true) + norms_s(group, run, false);
  return longest_s * group.crowding;
}

double RunCosts::after_s(const Group& group, Run run) const {
  const double bytes = parameter_bytes[run];
  if (bytes <= 0) return 0;
  return step_s(group, run) + (gathers ? 0 : group.all_reduce_s(bytes));
}

double GroupCosts::needed_bytes(const Group& group, const ReplicaKind& kind, Run run, int depth,
                                bool recompute) const {
  const double saved_bytes = (saved[run.hi] - saved[run.lo]).at(kind.rows);
  const double held = this->held(run, group.replicas) + workspaces[kind.workspace][run];
  if (!recompute || depth <= 1) return held + depth * saved_bytes;
  const double inputs = input_bytes[run].at(kind.rows);
  return held + (depth - 1) * inputs + std::max(saved_bytes, inputs);
}

bool GroupCosts::fits(const Group& group, Run run, int depth, bool recompute) const {
  return std::ranges::none_of(group.kinds, [&](const ReplicaKind& kind) {
    return needed_bytes(group, kind, run, depth, recompute) > kind.memory_bytes;
  });
}

Fit GroupCosts::fit(const Group& group, Run run, int depth, RecomputeChoice choice) const {
  if (choice != RecomputeChoice::all && fits(group, run, depth, false)) return Fit::keeps;
  if (choice != RecomputeChoice::none && fits(group, run, depth, true)) return Fit::recomputes;
  return Fit::too_large;
}

}  // namespace penstock
