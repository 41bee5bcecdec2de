#include "levels.hpp"

#include <algorithm>
#include <tuple>

#include "costs.hpp"

namespace penstock {
namespace {

/// The least seconds of layers lo..hi-1 on some workers, and its choice.
std::pair<double, std::int64_t> divide(const LevelCosts& costs, const LevelTable& table, int lo,
                                       int hi, int workers) {
  const int cuts = costs.cuts;
  const double less_s = table.value_s(lo, hi, workers - 1);
  double best_s = less_s * (1 + 1e-12);
  std::int64_t choice = -1;  // One worker less, unless something is no slower.
  int middle = lo + 1;
  for (int last = workers; last > 0; --last) {
    const double reduce_each = costs.reduce_each[last];
    if (reduce_each == kInfinity) continue;
    const int before = workers - last;
    const std::int64_t unit = costs.unit[before * table.counts + last];
    const double* unit_s = costs.unit_s + unit * cuts * cuts + hi;
    const auto stage_s = [&](int cut) {
      const double reduce_s = reduce_each * costs.parameter_bytes[cut * cuts + hi];
      return (unit_s[cut * cuts] + reduce_s) / last;
    };
    const auto try_choice = [&](double seconds, int cut) {
      if (seconds >= best_s) return;
      best_s = seconds;
      choice = static_cast<std::int64_t>(cut) * table.counts + last;
    };
    const double whole_s = stage_s(lo);
    // The first workers are idle only where it pays.
    if (before == 0 || whole_s * (1 + 1e-12) < less_s) try_choice(whole_s, lo);
    const double output_s = hi + 1 < cuts ? costs.move_s[hi] / last : 0;
    if (before == 0 || output_s >= best_s) continue;
    // From the cut that balances both sides outwards, while either can be better.
    for (int above = hi - 1; middle < above;) {
      const int cut = (middle + above) / 2;
      if (costs.least_s(lo, cut) * last < costs.least_s(cut, hi) * before)
        middle = cut + 1;
      else
        above = cut;
    }
    const auto try_cut = [&](int cut, double own_s) {
      const double beside_s = std::max(costs.move_s[cut] / last, output_s);
      try_choice(std::max({table.value_s(lo, cut, before), own_s, beside_s}), cut);
    };
    for (int cut = middle; cut < hi && costs.least_s(lo, cut) / before < best_s; ++cut)
      try_cut(cut, stage_s(cut));
    for (int cut = middle - 1; cut > lo; --cut) {
      const double own_s = stage_s(cut);
      if (own_s >= best_s) break;
      try_cut(cut, own_s);
    }
  }
  return {choice < 0 ? less_s : best_s, choice};
}

}  // namespace

void divide_level(const LevelCosts& costs, const LevelTable& table) {
  const int layers = costs.cuts - 1;
  for (int lo = 0; lo < std::min(table.starts, layers); ++lo) {
    for (int hi = lo + 1; hi <= layers; ++hi) {
      for (int workers = 1; workers < table.counts; ++workers) {
        const std::size_t at = table.at(lo, hi, workers);
        std::tie(table.seconds[at], table.choice[at]) = divide(costs, table, lo, hi, workers);
      }
    }
  }
}

}  // namespace penstock
