#include "levels.hpp"

#include <algorithm>
#include <limits>

namespace penstock {
namespace {

constexpr double kNoCount = std::numeric_limits<double>::infinity();

/// The best division of some layers among some workers, while choices are tried.
class Division {
 public:
  Division(const LevelCosts& costs, const LevelTable& table, int lo, int hi, int workers)
      : costs_(costs), table_(table), lo_(lo), hi_(hi), workers_(workers),
        less_s_(table.value_s(lo, hi, workers - 1)), best_s_(less_s_ * (1 + 1e-12)) {
    int middle = lo + 1;
    for (int last = workers; last > 0; --last)
      if (costs.reduce_each[last] != kNoCount) try_last(last, middle);
  }

  /// One worker less, unless something is no slower.
  double seconds() const { return choice_ < 0 ? less_s_ : best_s_; }
  std::int64_t choice() const { return choice_; }

 private:
  void try_last(int last, int& middle) {
    const int before = workers_ - last;
    const double whole_s = stage_s(lo_, last);
    // The first workers are idle only where it pays.
    const bool pays = before == 0 || whole_s * (1 + 1e-12) < less_s_;
    if (pays) keep_if_better(whole_s, lo_, last);
    const double output_s = hi_ + 1 < costs_.cuts ? costs_.move_s[hi_] / last : 0;
    if (before == 0 || output_s >= best_s_) return;
    // From the cut that balances both sides outwards, while either can be better.
    for (int above = hi_ - 1; middle < above;) {
      const int cut = (middle + above) / 2;
      if (costs_.least_s(lo_, cut) * last < costs_.least_s(cut, hi_) * before)
        middle = cut + 1;
      else
        above = cut;
    }
    const auto try_cut = [&](int cut, double own_s) {
      const double first_s = table_.value_s(lo_, cut, before);
      keep_if_better(std::max({first_s, own_s, costs_.move_s[cut] / last, output_s}), cut, last);
    };
    for (int cut = middle; lo_ < cut && cut < hi_; ++cut) {
      if (costs_.least_s(lo_, cut) / before >= best_s_) break;
      try_cut(cut, stage_s(cut, last));
    }
    for (int cut = middle - 1; lo_ < cut && cut < hi_; --cut) {
      const double own_s = stage_s(cut, last);
      if (own_s >= best_s_) break;
      try_cut(cut, own_s);
    }
  }

  double stage_s(int cut, int last) const {
    const std::int64_t unit = costs_.unit[(workers_ - last) * table_.counts + last];
    const std::size_t run = static_cast<std::size_t>(cut) * costs_.cuts + hi_;
    const double unit_s = costs_.unit_s[unit * costs_.cuts * costs_.cuts + run];
    return (unit_s + costs_.reduce_each[last] * costs_.parameter_bytes[run]) / last;
  }

  void keep_if_better(double seconds, int cut, int last) {
    if (seconds >= best_s_) return;
    best_s_ = seconds;
    choice_ = static_cast<std::int64_t>(cut) * table_.counts + last;
  }

  const LevelCosts& costs_;
  const LevelTable& table_;
  const int lo_, hi_, workers_;
  const double less_s_;
  double best_s_;
  std::int64_t choice_ = -1;
};

}  // namespace

void divide_level(const LevelCosts& costs, const LevelTable& table) {
  const int layers = costs.cuts - 1;
  for (int lo = 0; lo < std::min(table.starts, layers); ++lo) {
    for (int hi = lo + 1; hi <= layers; ++hi) {
      for (int workers = 1; workers < table.counts; ++workers) {
        const Division best(costs, table, lo, hi, workers);
        table.seconds[table.at(lo, hi, workers)] = best.seconds();
        table.choice[table.at(lo, hi, workers)] = best.choice();
      }
    }
  }
}

}  // namespace penstock
