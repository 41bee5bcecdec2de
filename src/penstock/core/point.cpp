#include "point.hpp"

#include <algorithm>
#include <cmath>

namespace penstock {
namespace {

constexpr double kAnotherMove = 0.3;  // probability that a move follows before points are compared

}  // namespace

bool PointRules::allows(const Point& point) const {
  if (point.groups() < least_groups || point.groups() > most_groups) return false;
  std::size_t kept = 0;
  for (const int at : point.cuts) {
    if (cut[at] == 0) return false;
    kept += cut[at] == 2;
  }
  return kept == static_cast<std::size_t>(std::ranges::count(cut, 2));
}

void Moves::make(const std::vector<int>* depths, bool of_all) {
  do {
    const double drawn = random_.unit() * (of_all ? 1.4 : 1);
    if (drawn < 0.35) {
      move_cut();
    } else if (drawn < 0.5) {
      swap_devices();
    } else if (drawn < 0.6) {
      swap_groups();
    } else if (drawn < 0.7) {
      move_device();
    } else if (drawn < 0.8) {
      join_groups();
    } else if (drawn < 0.95) {
      split_group();
    } else if (drawn < 1) {
      step(point_.size, 0, static_cast<int>(rules_.sizes.size()) - 1);
      point_.limits.clear();
    } else if (drawn < 1.2) {
      save_memory();
    } else if (drawn < 1.25 || !depths) {
      step(point_.depth, rules_.shallowest, rules_.deepest);
      point_.limits.clear();
    } else if (rules_.shallowest < rules_.deepest) {
      move_limit(*depths);
    }
  } while (random_.unit() < kAnotherMove);
}

/// Move a number up or down by one.
void Moves::step(int& value, int least, int most) {
  value = std::clamp(value + (random_.coin() ? 1 : -1), least, most);
}

/// Move one cut by some layers, by few more often than by many.
void Moves::move_cut() {
  if (point_.stages() == 1) return;
  const int place = 1 + random_.below(point_.stages() - 1);
  const int step = static_cast<int>(std::pow(2.0, random_.unit() * 3.6));
  const int cut = point_.cuts[place] + (random_.coin() ? step : -step);
  if (point_.cuts[place - 1] < cut && cut < point_.cuts[place + 1]) point_.cuts[place] = cut;
}

/// Swap two devices, wherever they are.
void Moves::swap_devices() {
  const int devices = static_cast<int>(point_.order.size());
  const int i = random_.below(devices), j = random_.below(devices);
  std::swap(point_.order[i], point_.order[j]);
}

/// Exchange the devices of two neighbouring groups, perhaps with their numbers of layers.
void Moves::swap_groups() {
  if (point_.groups() < 2) return;
  std::vector<int>&starts = point_.starts, &cuts = point_.cuts;
  const int at = 1 + random_.below(point_.groups() - 1);
  const auto device = [&](int k) { return point_.order.begin() + starts[k]; };
  std::rotate(device(at - 1), device(at), device(at + 1));
  starts[at] = starts[at - 1] + starts[at + 1] - starts[at];
  std::swap(point_.recompute[at - 1], point_.recompute[at]);
  std::swap(point_.sharding[at - 1], point_.sharding[at]);
  if (random_.coin() && rules_.has_one_stage_each())
    cuts[at] = cuts[at - 1] + cuts[at + 1] - cuts[at];
}

/// Move one device to another group, to none, or from none.
void Moves::move_device() {
  std::vector<int>& starts = point_.starts;
  const int devices = static_cast<int>(point_.order.size()), groups = point_.groups();
  const int place = random_.below(devices);
  const auto after = std::upper_bound(starts.begin(), starts.end(), place);
  const int giver = static_cast<int>(after - starts.begin()) - 1;
  const int taker = random_.below(groups + 1);
  if (giver == taker || (giver < groups && starts[giver + 1] - starts[giver] < 2)) return;
  const auto at = point_.order.begin();
  if (giver < taker) {
    const int target = taker < groups ? starts[taker + 1] - 1 : devices - 1;
    std::rotate(at + place, at + place + 1, at + target + 1);
    for (int g = giver + 1; g <= std::min(taker, groups); ++g) --starts[g];
  } else {
    std::rotate(at + starts[taker + 1], at + place, at + place + 1);
    for (int g = taker + 1; g <= std::min(giver, groups); ++g) ++starts[g];
  }
}

/// Join two neighbouring groups: in every round their stages become one.
void Moves::join_groups() {
  const int groups = point_.groups();
  if (groups == 1) return;
  const int at = 1 + random_.below(groups - 1);
  std::vector<int> cuts = {0};
  for (int s = 1; s <= point_.stages(); ++s) {
    const bool in_a_round = s % groups != 0;
    const int before = rules_.group_of(s - 1, groups), after = rules_.group_of(s, groups);
    if (!in_a_round || std::max(before, after) != at) cuts.push_back(point_.cuts[s]);
  }
  point_.cuts = cuts;
  point_.starts.erase(point_.starts.begin() + at);
  point_.recompute.erase(point_.recompute.begin() + at);
  point_.sharding.erase(point_.sharding.begin() + at);
  point_.limits.clear();
}

/// Split a group in two, between its devices or with a further device.
void Moves::split_group() {
  const int groups = point_.groups(), group = random_.below(groups);
  if (groups == rules_.most_groups) return;
  for (int s = 0; s < point_.stages(); ++s)
    if (rules_.group_of(s, groups) == group && point_.cuts[s + 1] - point_.cuts[s] < 2) return;
  const int width = point_.starts[group + 1] - point_.starts[group];
  const int devices = static_cast<int>(point_.order.size());
  int taken = 0, given = width;
  if (point_.starts.back() < devices && (width < 2 || random_.coin())) {
    taken = 1;
  } else if (width > 1) {
    given = 1 + random_.below(width - 1);
  } else {
    return;
  }
  std::vector<int> cuts = {0};
  for (int s = 0; s < point_.stages(); ++s) {
    const int lo = point_.cuts[s], hi = point_.cuts[s + 1];
    if (rules_.group_of(s, groups) == group) cuts.push_back(lo + 1 + random_.below(hi - lo - 1));
    cuts.push_back(hi);
  }
  std::vector<int>& starts = point_.starts;
  const auto at = point_.order.begin();
  std::rotate(at + starts[group + 1], at + starts.back(), at + starts.back() + taken);
  for (int g = group + 1; g <= groups; ++g) starts[g] += taken;
  starts.insert(starts.begin() + group + 1, starts[group] + given);
  point_.recompute.insert(point_.recompute.begin() + group, point_.recompute[group]);
  point_.sharding.insert(point_.sharding.begin() + group, point_.sharding[group]);
  point_.limits.clear();
  point_.cuts = cuts;
}

/// Let one group, or all, recompute or shard something else.
void Moves::save_memory() {
  const bool shards = rules_.shardings.size() > 1 && random_.coin();
  const std::vector<int>& choices = shards ? rules_.shardings : rules_.recomputes;
  std::vector<int>& values = shards ? point_.sharding : point_.recompute;
  const int chosen = choices[random_.below(static_cast<int>(choices.size()))];
  if (random_.unit() < 0.7)
    values[random_.below(point_.groups())] = chosen;
  else
    std::ranges::fill(values, chosen);
}

/// Let a stage have more or fewer micro-batches in flight. Depths never grow along the pipeline.
void Moves::move_limit(const std::vector<int>& depths) {
  if (point_.limits.empty()) point_.limits = depths;
  std::vector<int>& limits = point_.limits;
  const int at = random_.below(point_.stages());
  const double furthest = 1 + limits[at] * random_.unit() * random_.unit() / 2;
  const int change = 1 + static_cast<int>(furthest * random_.unit());
  const int limit = std::max(1, limits[at] + (random_.coin() ? change : -change));
  for (int s = 0; s < static_cast<int>(limits.size()); ++s)
    limits[s] = s < at ? std::max(limits[s], limit) : s > at ? std::min(limits[s], limit) : limit;
}

}  // namespace penstock
