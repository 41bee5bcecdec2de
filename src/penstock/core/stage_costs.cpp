#include "stage_costs.hpp"

#include <algorithm>
#include <cmath>

namespace penstock {

constexpr double kRounding = 1e-9;

StageCost StageCosts::of(std::span<const int> devices, std::span<int> rows, Run run, int size,
                         int micro_batches) {
  const RunCosts& runs = costs_.runs;
  split_rows(devices, rows, size);
  costs_.set_group(group_, costs_.step_s_per_byte, devices, rows);
  if (devices.size() > 1) set_reduce_costs(devices);
  StageCost cost{.forward_s = runs.forward_s(group_, run),
                 .backward_s = runs.backward_s(group_, run),
                 .after_s = runs.step_s(group_, run)};
  if (split_) cost.weight_s = weight_s(run);
  if (devices.size() > 1 && !runs.gathers) {
    cost.reduced_s = buckets_s(runs.parameter_bytes[run]);
    add_buckets(cost, run);
  }
  set_depths(cost, devices, rows, run, micro_batches);
  return cost;
}

StageSeconds StageCosts::seconds(std::span<const int> devices, std::span<const int> rows, Run run,
                                 std::vector<ReduceCost> all_reduces) {
  costs_.set_group(group_, costs_.step_s_per_byte, devices, rows);
  group_.all_reduces = std::move(all_reduces);
  const RunCosts& runs = costs_.runs;
  return {runs.forward_s(group_, run), runs.backward_s(group_, run), weight_s(run),
          runs.micro_batch_s(group_, run), runs.after_s(group_, run)};
}

/// The weights' part of a backward. Where reads make a backward longer, both of its parts are so by
/// as much; devices that divide parameters gather and scatter in whole backwards only.
double StageCosts::weight_s(Run run) const {
  if (costs_.runs.gathers && group_.replicas > 1) return 0;
  const double bytes = costs_.runs.parameter_bytes[run];
  const auto reads = [&](const ReplicaKind& kind) { return kind.chip.read_s(bytes) > 0; };
  if (std::ranges::none_of(group_.kinds, reads)) return slowest_s(costs_.weight, run);
  const double computed_s = slowest_s(costs_.runs.backward, run);
  const double pass_s = costs_.runs.pass_s(group_, run, false) * group_.crowding;
  const double longer = computed_s > 0 ? pass_s / computed_s : 1;
  return slowest_s(costs_.weight, run) * longer;
}

/// Seconds of a run on the replica that is slowest in it; `sums` are up to each cut.
double StageCosts::slowest_s(const std::vector<Affine>& sums, Run run) const {
  const Affine each = sums[run.hi] - sums[run.lo];
  double most_s = 0, rows = 0, speed = 0;
  for (const ReplicaKind& kind : group_.kinds) {
    if (kind.rows == rows && kind.speed == speed) continue;  // mostly all equal
    rows = kind.rows;
    speed = kind.speed;
    most_s = std::max(most_s, each.at(rows) * (group_.crowding / speed));
  }
  return most_s;
}

void StageCosts::split_rows(std::span<const int> devices, std::span<int> rows, int size) {
  const int count = static_cast<int>(devices.size());
  const auto speed = [&](int i) { return costs_.devices[devices[i]].speed; };
  double total = 0;
  bool equal = true;
  for (int i = 0; i < count; ++i) {
    total += speed(i);
    equal = equal && speed(i) == speed(0);
  }
  if (equal) {
    for (int i = 0; i < count; ++i) rows[i] = size / count + (i < size % count);
    return;
  }
  const int spare = size - count;
  const auto wish = [&](int i) { return std::max(0.0, size * speed(i) / total - 1); };
  double wanted = 0;
  for (int i = 0; i < count; ++i) wanted += wish(i);
  int left = spare;
  rest_.resize(count);
  for (int i = 0; i < count; ++i) {
    const double share = wanted > 0 ? spare * wish(i) / wanted : 0;
    rows[i] = 1 + static_cast<int>(share);
    rest_[i] = share - static_cast<int>(share);
    left -= static_cast<int>(share);
  }
  for (; left > 0; --left) {
    const auto best = std::ranges::max_element(rest_);
    ++rows[best - rest_.begin()];
    *best = -1;
  }
}

/// The most micro-batches in flight that fit without recompute, and with it; 0 for none.
void StageCosts::set_depths(StageCost& cost, std::span<const int> devices,
                            std::span<const int> rows, Run run, int micro_batches) const {
  const RunCosts& runs = costs_.runs;
  const auto at_most = [](int depth, double most) {
    return most < depth ? std::max(0, static_cast<int>(most)) : depth;
  };
  cost.kept = cost.leaner = micro_batches;
  cost.held = runs.held(run, group_.replicas);
  RunBytes bytes{};
  for (std::size_t i = 0; i < devices.size(); ++i) {
    if (i == 0 || rows[i] != rows[i - 1]) bytes = run_bytes(costs_, run, runs.input_bytes[run], rows[i]);
    const auto [saved, inputs, workspace] = bytes;
    cost.memory = std::min(cost.memory, costs_.devices[devices[i]].memory_bytes);
    cost.workspace = std::max(cost.workspace, workspace);
    cost.saved = std::max(cost.saved, saved);
    cost.inputs = std::max(cost.inputs, inputs);
    const double room =
        costs_.devices[devices[i]].memory_bytes - cost.held - workspace;
    if (room < saved) cost.kept = cost.leaner = 0;
    if (saved > 0) cost.kept = at_most(cost.kept, room / saved);
    if (inputs > 0) {
      const double most = (room - std::max(saved - inputs, 0.0)) / inputs;
      cost.leaner = at_most(cost.leaner, std::max(1.0, most));
    }
  }
}

/// The two algorithms of `penstock.cluster.collectives`.
///
/// The ring passes the devices in the order of their numbers. Between explicit links the simulator
/// finds the best order, so the ring may be faster there.
void StageCosts::set_reduce_costs(std::span<const int> devices) {
  const Links& links = costs_.links;
  std::vector<int>& ring = devices_in_order_;
  ring.assign(devices.begin(), devices.end());
  std::ranges::sort(ring);
  const auto host_of = [&](int device) { return costs_.devices[device].host; };
  const auto both_ways_bytes_per_s = [&](int i, int j) {
    const bool in_turn =
        costs_.hosts[host_of(i)].half_duplex || costs_.hosts[host_of(j)].half_duplex;
    return links.bytes_per_s[links.of(i, j)] * (in_turn ? 0.5 : 1);
  };
  const auto steps_around = [&](const std::vector<int>& members) {
    double slowest = kInfinity, latency_s = 0;
    for (std::size_t i = 0; i < members.size(); ++i) {
      const int next = members[(i + 1) % members.size()];
      slowest = std::min(slowest, both_ways_bytes_per_s(members[i], next));
      latency_s = std::max({latency_s, links.latency_s[links.of(members[i], next)],
                            links.sum_step_s});
    }
    return std::pair(slowest, latency_s);
  };
  const double count = static_cast<double>(ring.size()), steps = count - 1;
  const auto [slowest, latency_s] = steps_around(ring);
  group_.all_reduces = {{2 * steps * latency_s, 2 * steps / count / slowest}};

  first_of_hosts_.clear();
  double inside_latency_s = 0, inside_rate = 0, chain_latency_s = 0, chain_rate = 0;
  bool alone = true;
  for (std::size_t i = 0; i < ring.size(); ++i) {
    if (i == 0 || host_of(ring[i]) != host_of(ring[i - 1])) {
      first_of_hosts_.push_back(ring[i]);
      chain_latency_s = chain_rate = 0;
      alone = true;
      continue;
    }
    const std::size_t link = links.of(ring[i - 1], ring[i]);
    chain_latency_s += std::max(links.latency_s[link], links.sum_step_s);
    chain_rate = std::max(chain_rate, 1 / both_ways_bytes_per_s(ring[i - 1], ring[i]));
    inside_latency_s = std::max(inside_latency_s, chain_latency_s);
    // Only devices inside a longer chain send and receive at the same time.
    inside_rate = std::max(inside_rate, alone ? 1 / links.bytes_per_s[link] : chain_rate);
    alone = false;
  }
  if (first_of_hosts_.size() == 1 || first_of_hosts_.size() == ring.size()) return;
  const double hosts = static_cast<double>(first_of_hosts_.size());
  const auto [slowest_host, host_latency_s] = steps_around(first_of_hosts_);
  group_.all_reduces.push_back({2 * inside_latency_s + 2 * (hosts - 1) * host_latency_s,
                                2 * inside_rate + 2 * (hosts - 1) / hosts / slowest_host});
}

double StageCosts::buckets_s(double bytes) const {
  const GradientShare share = share_of(group_, 0, bytes, costs_.rules);
  return share.buckets > 0 ? share.buckets * share.seconds : 0;
}

/// Add the seconds from the end of a stage's last backward to the end of its buckets. They are
/// complete during that backward, or its part for the weights.
///
/// A bucket waits for the replica that is slowest in the layers down to it. Parameters that layers
/// share are complete at the end of the backward.
void StageCosts::add_buckets(StageCost& cost, Run run) const {
  const RunCosts& runs = costs_.runs;
  const double pass_s = split_ ? cost.weight_s : cost.backward_s;
  const double own = costs_.own_bytes[run.hi] - costs_.own_bytes[run.lo];
  double free_s = -pass_s;
  for_buckets(costs_.own_bytes, run, costs_.rules.bucket_bytes, [&](int layer, double bytes) {
    const Run down = {layer, run.hi};
    const double norms_s = split_ ? 0 : runs.norms_s(group_, down, false) * group_.crowding;
    const double done_s =
        slowest_s(split_ ? costs_.weight : runs.backward, down) - pass_s + norms_s;
    const double start_s = std::max(free_s, done_s);
    const GradientShare share = share_of(group_, 0, bytes, costs_.rules);
    free_s = start_s + share.buckets * share.seconds;
    if (start_s < -kRounding * pass_s) {
      cost.early_s = -start_s;
      cost.blocked_s =
          std::min(free_s, start_s + share.seconds * std::ceil(-start_s / share.seconds));
      cost.blocked_s = std::max(0.0, cost.blocked_s);
    }
  });
  const double shared = runs.parameter_bytes[run] - own;
  if (shared > 0) free_s = std::max(free_s, 0.0) + buckets_s(shared);
  cost.after_s += std::max(0.0, free_s);
}

}  // namespace penstock
