#include "plan_load.hpp"

#include <algorithm>
#include <cmath>

namespace penstock {
namespace {

/// A whole power, by squaring.
double raised(double value, int power) {
  double result = 1;
  for (; power > 0; power /= 2, value *= value)
    if (power % 2) result *= value;
  return result;
}

}  // namespace

double PlanLoad::seconds(const Point& point) {
  const int size = now_.size = rules_.sizes[point.size], groups = point.groups();
  now_.order = point.order;
  now_.rows.resize(point.order.size());
  now_.ports.resize(point.order.size());
  now_.stages.clear();
  for (int s = 0; s < point.stages(); ++s) {
    const int group = rules_.group_of(s, groups);
    const int first = point.starts[group], last = point.starts[group + 1];
    if (last - first > size) {
      now_.stages.clear();
      return kInfinity;
    }
    now_.stages.push_back({group, first, last, {point.cuts[s], point.cuts[s + 1]}});
  }
  cost_stages();
  carry_tensors(point.cuts);
  const bool steady = question_.steady;
  std::vector<Stage>& stages = now_.stages;
  for (int s = point.stages() - 2; s >= 0; --s) {
    const StageCost& next = stages[s + 1].cost;
    const double trip_s = next.forward_s + next.backward_s + stages[s].down_s + stages[s].up_s;
    stages[s].below_s = stages[s + 1].below_s + trip_s;
  }
  Way way;
  loads_.clear();
  for (int s = 0; s < point.stages(); ++s) add_stage_loads(s, way);
  add_port_loads(way.late_s);
  return norm_s() + (steady ? stages[0].below_s + way.late_s : 0);
}

void PlanLoad::cost_stages() {
  for (int s = 0; s < static_cast<int>(now_.stages.size()); ++s) {
    Stage& stage = now_.stages[s];
    if (copy_from_kept(s)) continue;
    const int replicas = stage.last - stage.first;
    const std::span devices(&now_.order[stage.first], replicas);
    const std::span rows(&now_.rows[stage.first], replicas);
    stage.cost = stage_costs_.of(devices, rows, stage.run, now_.size, micro_batches());
    set_ports(stage);
  }
}

/// Copy the costs of a stage from the plan that was kept last, if that has the same stage near.
bool PlanLoad::copy_from_kept(int number) {
  if (kept_.size != now_.size) return false;
  Stage& stage = now_.stages[number];
  const int replicas = stage.last - stage.first;
  const int stages = static_cast<int>(kept_.stages.size());
  for (int s = std::max(0, number - 1); s < std::min(stages, number + 2); ++s) {
    const Stage& other = kept_.stages[s];
    if (other.run != stage.run || other.last - other.first != replicas ||
        !std::equal(&now_.order[stage.first], &now_.order[stage.first] + replicas,
                    &kept_.order[other.first]))
      continue;
    stage.cost = other.cost;
    std::copy_n(&kept_.rows[other.first], replicas, &now_.rows[stage.first]);
    std::copy_n(&kept_.ports[other.first], replicas, &now_.ports[stage.first]);
    return true;
  }
  return false;
}

/// An all-reduce uses the ports of hosts where some pair of its devices has no link of its own.
void PlanLoad::set_ports(const Stage& stage) {
  std::fill(&now_.ports[stage.first], &now_.ports[stage.first] + (stage.last - stage.first), 0);
  if (costs_.hosts.size() == 1) return;
  const std::vector<int>& order = now_.order;
  const auto host_of = [&](int place) { return costs_.devices[order[place]].host; };
  for (int k = stage.first; k < stage.last; ++k) {
    int leader = stage.first;
    while (host_of(leader) != host_of(k)) ++leader;
    int& used = now_.ports[leader];
    for (int other = stage.first; other < stage.last && used != (kSends | kReceives); ++other) {
      if (costs_.links.uses_port[costs_.links.of(order[k], order[other])]) used |= kSends;
      if (costs_.links.uses_port[costs_.links.of(order[other], order[k])]) used |= kReceives;
    }
  }
}

/// Add the tensors of a micro-batch to engines and ports.
void PlanLoad::carry_tensors(const std::vector<int>& cuts) {
  engines_.assign(now_.order.size(), {});
  ports_.assign(costs_.hosts.size(), {});
  const auto home_of = [&](int s) { return now_.stages[s].group; };
  for_sent_tensors(costs_, cuts, home_of, stage_of_layer_, [&](int s, int t, const Tensor& tensor) {
    Stage &from = now_.stages[s], &to = now_.stages[t];
    const double down_s = carry(tensor.bytes, from, to);
    const double up_s = carry(tensor.gradient_bytes, to, from);
    if (t == s + 1) {
      from.down_s += down_s;
      from.up_s += up_s;
    }
  });
}

/// Add one tensor between two stages to the engines and ports; returns its longest message.
double PlanLoad::carry(Affine bytes, const Stage& from, const Stage& to) {
  double longest_s = 0;
  if (from.group == to.group || (bytes.fixed == 0 && bytes.each == 0)) return longest_s;
  const Places senders = {from.first, from.last}, receivers = {to.first, to.last};
  for_shared_rows(now_.rows, senders, receivers, [&](int i, int j, int shared) {
    const int source = now_.order[i], target = now_.order[j];
    const std::size_t link = costs_.links.of(source, target);
    const double seconds = costs_.links.message_s(link, 1, bytes.at(shared));
    engines_[i].sent_s += seconds;
    engines_[j].received_s += seconds;
    if (costs_.links.uses_port[link]) {
      ports_[costs_.devices[source].host].sent_s += seconds;
      ports_[costs_.devices[target].host].received_s += seconds;
    }
    longest_s = std::max(longest_s, seconds);
  });
  return longest_s;
}

/// Least seconds from the first forward to the last backward within memory (Little's law).
double PlanLoad::busy_s(const Stage& stage) const {
  if (!rules_.has_one_stage_each()) return busy_with_several_s(stage.group);
  const StageCost& cost = stage.cost;
  const double whole_s = cost.forward_s + cost.backward_s;
  double least_s = kInfinity;
  if (question_.recompute != RecomputeMode::always && cost.kept > 0)
    least_s = micro_batches() * std::max(whole_s, (whole_s + stage.below_s) / cost.kept);
  if (question_.recompute != RecomputeMode::never && cost.leaner > 0) {
    const double again_s = whole_s + std::min(cost.forward_s, stage.below_s);
    const double filled_s = (whole_s + stage.below_s) / cost.leaner;
    least_s = std::min(least_s, micro_batches() * std::max(again_s, filled_s));
  }
  return least_s;
}

/// The same of a group that holds several stages, which share its memory.
double PlanLoad::busy_with_several_s(int group) const {
  double work_s = 0, again_s = 0, held = 0, workspace = 0, saved = 0, inputs = 0;
  double memory = kInfinity, kept_s = 0, read_s = 0;
  for (const Stage& stage : now_.stages) {
    if (stage.group != group) continue;
    const StageCost& cost = stage.cost;
    const double whole_s = cost.forward_s + cost.backward_s, way_s = whole_s + stage.below_s;
    work_s += whole_s;
    again_s += whole_s + cost.forward_s;
    held += cost.held;
    workspace = std::max(workspace, cost.workspace);
    saved += cost.saved;
    inputs += cost.inputs;
    memory = std::min(memory, cost.memory);
    kept_s += cost.saved * way_s;  // bytes times seconds
    read_s += cost.inputs * way_s;
  }
  const double room = memory - held - workspace;
  double least_s = kInfinity;
  if (question_.recompute != RecomputeMode::always && room >= saved)
    least_s = micro_batches() * std::max(work_s, saved > 0 ? kept_s / room : 0);
  if (question_.recompute != RecomputeMode::never && room >= inputs + saved)
    least_s = std::min(least_s, micro_batches() * std::max(again_s, inputs > 0 ? read_s / (room - saved) : 0));
  return least_s;
}

/// Add the loads of a group with its first stage: computing, receiving, sending; then the next.
void PlanLoad::add_stage_loads(int number, Way& way) {
  const Stage& stage = now_.stages[number];
  const StageCost& cost = stage.cost;
  const bool steady = question_.steady;
  double arrival_s = stage.below_s + cost.forward_s, up_before_s = way.after_s;
  if (number > 0) {
    arrival_s = way.first_s - now_.stages[number - 1].down_s;
    up_before_s = now_.stages[number - 1].up_s;
  }
  double left_s = way.drain_s, received_s = way.drain_s, sent_s = way.drain_s;
  if (!steady) {
    left_s = std::max(cost.after_s, way.after_s);
    received_s = std::max(cost.backward_s + left_s, cost.reduced_s);
    sent_s = std::max(cost.reduced_s, way.after_s - up_before_s);
  }
  double sent = 0, received = 0, both = 0;
  for (int k = stage.first; k < stage.last; ++k) {
    const auto [sends_s, receives_s] = engines_[k];
    if (costs_.hosts[costs_.devices[now_.order[k]].host].half_duplex)
      both = std::max(both, micro_batches() * (sends_s + receives_s));
    sent = std::max(sent, micro_batches() * sends_s);
    received = std::max(received, micro_batches() * receives_s);
  }
  double receiving_s = arrival_s + received + received_s;
  if (both > 0) {
    // One engine from the first message, in either direction, to the last one.
    const double from_s = std::min(arrival_s, way.first_s + cost.forward_s);
    receiving_s = std::max(receiving_s, from_s + both + std::min(received_s, sent_s));
  }
  if (number < static_cast<int>(now_.stages.size()) / rules_.rounds) {
    loads_.push_back(way.first_s + busy_s(stage) + left_s);
    loads_.push_back(receiving_s);
    loads_.push_back(way.first_s + cost.forward_s + sent + sent_s);
  }
  way.late_s = steady ? std::max(way.late_s, cost.after_s - 2 * way.drain_s) : 0;
  way.first_s += cost.forward_s + stage.down_s;
  way.after_s = cost.backward_s + std::max(cost.after_s, way.after_s) + stage.up_s;
  way.drain_s += cost.backward_s + stage.up_s;
}

/// Add the loads of ports; all-reduces count beyond `late_s`.
void PlanLoad::add_port_loads(double late_s) {
  reduced_.assign(costs_.hosts.size(), {});
  for (const Stage& stage : now_.stages) {
    for (int k = stage.first; k < stage.last; ++k) {
      Sides& reduced = reduced_[costs_.devices[now_.order[k]].host];
      if (now_.ports[k] & kSends) reduced.sent_s += stage.cost.reduced_s;
      if (now_.ports[k] & kReceives) reduced.received_s += stage.cost.reduced_s;
    }
  }
  for (std::size_t h = 0; h < costs_.hosts.size(); ++h) {
    const double sent_s = micro_batches() * ports_[h].sent_s;
    const double received_s = micro_batches() * ports_[h].received_s;
    const double left_s = std::max(0.0, reduced_[h].sent_s - late_s);
    const double more_s = std::max(0.0, reduced_[h].received_s - late_s);
    if (costs_.hosts[h].half_duplex) {
      loads_.push_back(sent_s + received_s + std::max(left_s, more_s));
    } else {
      loads_.push_back(sent_s + left_s);
      loads_.push_back(received_s + more_s);
    }
  }
}

/// The norm of a power of all loads, or the largest where the power is 0.
double PlanLoad::norm_s() const {
  constexpr double kLoadsOfAStage = 3;
  const double most_s = std::ranges::max(loads_);
  const int power = question_.power;
  if (!(0 < most_s && most_s < kInfinity) || power <= 0) return most_s;
  double total = 0;
  for (const double load : loads_) total += raised(load / most_s, power);
  return most_s * std::pow(total / kLoadsOfAStage, 1.0 / power);
}

}  // namespace penstock
