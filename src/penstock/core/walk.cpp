#include "walk.hpp"

#include <algorithm>
#include <cmath>
#include <map>

namespace penstock {

constexpr double kCold = 1e-4;  // the share by which slower points are accepted at the end

std::vector<Found> random_walk(const SearchCosts& costs, const PointRules& rules,
                               const Point& start, LoadQuestion question, double heat, int steps,
                               std::uint32_t seed) {
  std::map<std::pair<int, int>, Found> best;
  const auto keep = [&](const Point& point, double seconds) {
    const auto [at, is_new] = best.try_emplace({point.size, point.groups()}, seconds, point);
    if (!is_new && seconds < at->second.seconds) at->second = {seconds, point};
  };
  Random random(seed);
  PlanLoad load(costs, rules, question);
  Point now = start, next;
  now.limits.clear();
  double now_s = load.seconds(now);
  load.keep();
  keep(now, now_s);
  for (int step = 0; step < steps; ++step) {
    next = now;
    Moves(rules, next, random).make();
    if (!rules.allows(next)) continue;
    const double seconds = load.seconds(next);
    const double warmth = heat * (1 - static_cast<double>(step) / steps) + kCold;
    const double limit_s = now_s * (1 - warmth * std::log(1 - random.unit()));
    if (now_s < kInfinity && (!(seconds < kInfinity) || seconds > limit_s)) continue;
    std::swap(now, next);
    now_s = seconds;
    load.keep();
    keep(now, now_s);
  }
  std::vector<Found> found;
  for (auto& [key, one] : best)
    if (one.seconds < kInfinity) found.push_back(std::move(one));
  std::ranges::stable_sort(found, {}, &Found::seconds);
  return found;
}

}  // namespace penstock
