#include "point.hpp"

#include <algorithm>
#include <cmath>

namespace penstock {
namespace {

constexpr double kAnotherMove = 0.3;  // probability that a move follows before plans are compared

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

void shift_device(Point& point, int place, int target) {
  const auto at = point.order.begin();
  if (place < target)
    std::rotate(at + place, at + place + 1, at + target + 1);
  else
    std::rotate(at + target, at + place, at + place + 1);
}

void swap_groups(Point& point, int second) {
  std::vector<int>& starts = point.starts;
  const auto device = [&](int k) { return point.order.begin() + starts[k]; };
  std::rotate(device(second - 1), device(second), device(second + 1));
  starts[second] = starts[second - 1] + starts[second + 1] - starts[second];
  std::swap(point.recompute[second - 1], point.recompute[second]);
  std::swap(point.sharding[second - 1], point.sharding[second]);
}

void give_device(Point& point, int place, int giver, int taker) {
  std::vector<int>& starts = point.starts;
  const int groups = point.groups(), devices = static_cast<int>(point.order.size());
  if (giver < taker) {
    shift_device(point, place, taker < groups ? starts[taker + 1] - 1 : devices - 1);
    for (int g = giver + 1; g <= std::min(taker, groups); ++g) --starts[g];
  } else {
    shift_device(point, place, starts[taker + 1]);
    for (int g = taker + 1; g <= std::min(giver, groups); ++g) ++starts[g];
  }
}

void join_groups(Point& point, int second, bool straight) {
  point.starts.erase(point.starts.begin() + second);
  point.recompute.erase(point.recompute.begin() + second);
  point.sharding.erase(point.sharding.begin() + second);
  if (straight) point.cuts.erase(point.cuts.begin() + second);
  point.limits.clear();
}

void split_group(Point& point, int group, int width, int taken, int cut) {
  std::vector<int>& starts = point.starts;
  if (taken > 0) {
    const auto at = point.order.begin();
    std::rotate(at + starts[group + 1], at + starts.back(), at + starts.back() + taken);
    for (int g = group + 1; g <= point.groups(); ++g) starts[g] += taken;
  }
  starts.insert(starts.begin() + group + 1, starts[group] + width);
  point.recompute.insert(point.recompute.begin() + group, point.recompute[group]);
  point.sharding.insert(point.sharding.begin() + group, point.sharding[group]);
  if (cut > 0) point.cuts.insert(point.cuts.begin() + group + 1, cut);
  point.limits.clear();
}

void Moves::make() {
  do {
    const double drawn = random_.unit();
    if (drawn < 0.35) {
      move_cut();
    } else if (drawn < 0.5) {
      swap_devices();
    } else if (drawn < 0.6) {
      if (point_.groups() < 2) continue;
      const int at = 1 + random_.below(point_.groups() - 1);
      swap_groups(point_, at);
      // Perhaps with their numbers of layers.
      if (random_.coin() && rules_.has_one_stage_each())
        point_.cuts[at] = point_.cuts[at - 1] + point_.cuts[at + 1] - point_.cuts[at];
    } else if (drawn < 0.7) {
      move_device();
    } else if (drawn < 0.8) {
      join_groups();
    } else if (drawn < 0.95) {
      split_group();
    } else {
      const int last = static_cast<int>(rules_.sizes.size()) - 1;
      point_.size = std::clamp(point_.size + (random_.coin() ? 1 : -1), 0, last);
    }
  } while (random_.unit() < kAnotherMove);
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

/// Move one device to another group, to none, or from none.
void Moves::move_device() {
  const std::vector<int>& starts = point_.starts;
  const int place = random_.below(static_cast<int>(point_.order.size()));
  const auto after = std::upper_bound(starts.begin(), starts.end(), place);
  const int giver = static_cast<int>(after - starts.begin()) - 1;
  const int taker = random_.below(point_.groups() + 1);
  if (giver == taker || (giver < point_.groups() && starts[giver + 1] - starts[giver] < 2)) return;
  give_device(point_, place, giver, taker);
}

/// Join two neighbouring groups; with several stages on each, rounds keep their shares of layers.
void Moves::join_groups() {
  const int groups = point_.groups();
  if (groups == 1) return;
  const int at = 1 + random_.below(groups - 1);
  if (!rules_.has_one_stage_each()) {
    // In every round the stage of the group is joined with the one beside it in the pipeline.
    std::vector<int> cuts = {0};
    for (int s = 0; s + 1 < point_.stages(); ++s) {
      const int g = rules_.group_of(s, groups), next = rules_.group_of(s + 1, groups);
      if (s / groups == (s + 1) / groups && std::min(g, next) == at - 1 && std::max(g, next) == at)
        continue;
      cuts.push_back(point_.cuts[s + 1]);
    }
    cuts.push_back(point_.cuts.back());
    point_.cuts = cuts;
  }
  penstock::join_groups(point_, at, rules_.has_one_stage_each());
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
  penstock::split_group(point_, group, given, taken, 0);
  point_.cuts = cuts;
}

}  // namespace penstock
