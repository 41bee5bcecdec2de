// A random walk over plans that compares their loads.
#pragma once

#include <bit>
#include <cstdint>
#include <random>
#include <vector>

#include "plan_load.hpp"

namespace penstock {

/// A walk of `steps` plans. `sizes` are those of micro-batches; `first` is the index of the
/// start's. At first, plans that are slower by about the share `heat` are accepted.
struct WalkPlan {
  std::vector<int> sizes;
  int first;
  LoadQuestion asked;
  double heat;
  int steps;
  std::uint32_t seed;
};

/// The best plan with one size of micro-batches and one number of stages.
struct Found {
  double seconds;
  int size;
  Layout layout;
};

/// The random numbers of `numpy.random.seed`: a Mersenne Twister.
class Random {
 public:
  explicit Random(std::uint32_t seed) : engine_(seed) {}

  /// At least 0 and below 1.
  double unit() {
    const std::uint32_t high = engine_() >> 5, low = engine_() >> 6;
    return (high * 67108864.0 + low) / 9007199254740992.0;
  }
  bool coin() { return unit() < 0.5; }

  /// At least 0 and below `end`.
  int below(int end) {
    if (end == 1) return 0;
    const std::uint32_t mask = std::bit_ceil(static_cast<std::uint32_t>(end)) - 1;
    std::uint32_t drawn;
    do drawn = engine_() & mask;
    while (drawn >= static_cast<std::uint32_t>(end));
    return static_cast<int>(drawn);
  }

 private:
  std::mt19937 engine_;
};

/// The best plans on a random walk by simulated annealing (Kirkpatrick et al., Science 1983): those
/// of the least load for each size of micro-batches and number of stages, in this order.
std::vector<Found> random_walk(const SearchCosts& costs, const Layout& start, const WalkPlan& walk);

}  // namespace penstock
