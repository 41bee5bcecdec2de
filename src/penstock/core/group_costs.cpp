#include "group_costs.hpp"

namespace penstock {

double Group::all_reduce_s(double bytes) const {
  double least_s = kInfinity;
  for (const ReduceCost& cost : all_reduces) least_s = std::min(least_s, cost.of(bytes));
  return least_s;
}

double GroupCosts::slowest_s(const Group& group, Affine seconds) const {
  double longest_s = 0;
  for (const ReplicaKind& kind : group.kinds)
    longest_s = std::max(longest_s, seconds.at(kind.rows) / kind.speed);
  return longest_s;
}

/// Seconds that replicas wait for batch norm's statistics, as `collectives.norm_sums_s`.
double GroupCosts::norms_s(const Group& group, Run run, bool forward) const {
  const auto [count, channels] = norms[run.hi] - norms[run.lo];
  if (count <= 0 || group.replicas < 2) return 0;
  double bytes = 2 * channels / count * rules.statistic_bytes;
  if (forward) bytes = group.replicas * (bytes + rules.statistic_bytes);
  return count * (rules.statistics_s + group.all_reduce_s(bytes));
}

double GroupCosts::forward_s(const Group& group, Run run) const {
  const double longest_s = slowest_s(group, forward[run.hi] - forward[run.lo]);
  return (longest_s + norms_s(group, run, true)) * group.crowding;
}

double GroupCosts::backward_s(const Group& group, Run run) const {
  const double longest_s = slowest_s(group, backward[run.hi] - backward[run.lo]);
  return (longest_s + norms_s(group, run, false)) * group.crowding;
}

double GroupCosts::micro_batch_s(const Group& group, Run run) const {
  const Affine seconds = forward[run.hi] - forward[run.lo] + backward[run.hi] - backward[run.lo];
  double longest_s = slowest_s(group, seconds);
  longest_s += norms_s(group, run, true) + norms_s(group, run, false);
  return longest_s * group.crowding;
}

double GroupCosts::after_s(const Group& group, Run run) const {
  const double bytes = parameter_bytes[run];
  return bytes > 0 ? group.all_reduce_s(bytes) + group.step_s_per_byte * bytes : 0;
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

void Transfers::add_message(int resource, std::size_t link, int rows) {
  busy_[resource].latency_s += network_.latency_s[link];
  busy_[resource].s_per_byte += network_.s_per_byte[link];
  busy_[resource].s_per_row_byte += network_.s_per_byte[link] * rows;
}

void Transfers::loads(int sender, int receiver, std::vector<MessageLoad>& found) {
  const std::vector<Network::Member>&from = network_.groups[sender],
        &to = network_.groups[receiver];
  for (const auto& [device, rows] : from)
    busy_[engine_out(device)] = busy_[port_out(device)] = {};
  for (const auto& [device, rows] : to) busy_[engine_in(device)] = busy_[port_in(device)] = {};
  int row = 0, have = from[0].rows, need = to[0].rows;
  for (std::size_t i = 0, j = 0; i < from.size() && j < to.size();) {
    const int end = std::min(have, need), a = from[i].device, b = to[j].device;
    if (end > row && a != b) {
      const std::size_t link = static_cast<std::size_t>(a) * network_.devices + b;
      add_message(engine_out(a), link, end - row);
      add_message(engine_in(b), link, end - row);
      if (network_.uses_port[link]) {
        add_message(port_out(a), link, end - row);
        add_message(port_in(b), link, end - row);
      }
    }
    row = end;
    if (have == end && ++i < from.size()) have += from[i].rows;
    if (need == end && ++j < to.size()) need += to[j].rows;
  }
  found.clear();
  for (const auto& [device, rows] : from) {
    keep(busy_[engine_out(device)], found);
    keep(busy_[port_out(device)], found);
  }
  for (const auto& [device, rows] : to) {
    keep(busy_[engine_in(device)], found);
    keep(busy_[port_in(device)], found);
  }
}

/// Keep a load unless another one outweighs it. Of more than the most, the last ones are merged.
void Transfers::keep(const MessageLoad& load, std::vector<MessageLoad>& found) const {
  constexpr std::size_t kMost = 8;
  const auto outweighs = [&](const MessageLoad& other) { return other.outweighs(load); };
  if (std::ranges::any_of(found, outweighs)) return;
  std::erase_if(found, [&](const MessageLoad& other) { return load.outweighs(other); });
  if (found.size() < kMost) {
    found.push_back(load);
    return;
  }
  MessageLoad& last = found.back();
  last = {std::max(last.latency_s, load.latency_s), std::max(last.s_per_byte, load.s_per_byte),
          std::max(last.s_per_row_byte, load.s_per_row_byte)};
}

double Transfers::seconds(const std::vector<MessageLoad>& loads, Affine bytes) {
  double longest_s = 0;
  if (bytes.fixed + bytes.each > 0)
    for (const MessageLoad& load : loads) longest_s = std::max(longest_s, load.seconds(bytes));
  return longest_s;
}

}  // namespace penstock
