#include "costs.hpp"

namespace penstock {
namespace {

/// The longest of the replicas' times.
double slowest_s(const Group& group, Affine seconds) {
  double longest_s = 0;
  for (const ReplicaKind& kind : group.kinds)
    longest_s = std::max(longest_s, seconds.at(kind.rows) / kind.speed);
  return longest_s;
}

}  // namespace

double Group::all_reduce_s(double bytes) const {
  double least_s = kInfinity;
  for (const ReduceCost& cost : all_reduces) least_s = std::min(least_s, cost.of(bytes));
  return least_s;
}

double RunCosts::norms_s(const Group& group, Run run, bool forward) const {
  const auto [count, channels] = norms[run.hi] - norms[run.lo];
  if (count <= 0 || group.replicas < 2) return 0;
  double bytes = 2 * channels / count * rules.statistic_bytes;
  if (forward) bytes = group.replicas * (bytes + rules.statistic_bytes);
  return count * (rules.statistics_s + group.all_reduce_s(bytes));
}

double RunCosts::forward_s(const Group& group, Run run) const {
  const double longest_s = slowest_s(group, forward[run.hi] - forward[run.lo]);
  return (longest_s + norms_s(group, run, true)) * group.crowding;
}

double RunCosts::backward_s(const Group& group, Run run) const {
  const double longest_s = slowest_s(group, backward[run.hi] - backward[run.lo]);
  return (longest_s + norms_s(group, run, false)) * group.crowding;
}

double RunCosts::micro_batch_s(const Group& group, Run run) const {
  const Affine seconds = forward[run.hi] - forward[run.lo] + backward[run.hi] - backward[run.lo];
  double longest_s = slowest_s(group, seconds);
  longest_s += norms_s(group, run, true) + norms_s(group, run, false);
  return longest_s * group.crowding;
}

double RunCosts::after_s(const Group& group, Run run) const {
  const double bytes = parameter_bytes[run];
  return bytes > 0 ? group.all_reduce_s(bytes) + step_s(group, run) : 0;
}

double GroupCosts::needed_bytes(const ReplicaKind& kind, Run run, int depth,
                                bool recompute) const {
  const double saved_bytes = (saved[run.hi] - saved[run.lo]).at(kind.rows);
  const double held = held_bytes[run] + workspaces[kind.workspace][run];
  if (!recompute || depth <= 1) return held + depth * saved_bytes;
  const double inputs = input_bytes[run].at(kind.rows);
  return held + (depth - 1) * inputs + std::max(saved_bytes, inputs);
}

bool GroupCosts::fits(const Group& group, Run run, int depth, bool recompute) const {
  return std::ranges::none_of(group.kinds, [&](const ReplicaKind& kind) {
    return needed_bytes(kind, run, depth, recompute) > kind.memory_bytes;
  });
}

Fit GroupCosts::fit(const Group& group, Run run, int depth, RecomputeChoice choice) const {
  if (choice != RecomputeChoice::all && fits(group, run, depth, false)) return Fit::keeps;
  if (choice != RecomputeChoice::none && fits(group, run, depth, true)) return Fit::recomputes;
  return Fit::too_large;
}

}  // namespace penstock
