// A random walk over points that compares their loads.
#pragma once

#include "plan_load.hpp"
#include "point.hpp"

namespace penstock {

/// A point with its seconds, and the micro-batches in flight of its stages.
struct Found {
  double seconds;
  Point point;
  std::vector<int> depths = {};
};

/// The best points on a random walk by simulated annealing (Kirkpatrick et al., Science 1983): those
/// of the least load for each size of micro-batches and number of groups, the best first. At first,
/// points that are slower by about the share `heat` are accepted.
std::vector<Found> random_walk(const SearchCosts& costs, const PointRules& rules,
                               const Point& start, LoadQuestion question, double heat, int steps,
                               std::uint32_t seed);

}  // namespace penstock
