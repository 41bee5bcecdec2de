// PipeDream's recurrence on one level of a cluster; it is at `penstock.planners.pipedream`.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

/// Costs of the stages of a level; runs of layers are rows of first cuts and columns of last cuts.
struct LevelCosts {
  int cuts;
  const double* unit_s;       // of several kinds of workers: seconds of a micro-batch of each run
  const std::int64_t* unit;   // by workers before a stage and its own: which kind they are
  const double* least_each_s; // seconds of a run that one worker needs at least; they add up
  const double* parameter_bytes;
  const double* reduce_each;  // by workers: seconds for each byte of parameters; infinite: too many
  const double* move_s;       // by cut: both directions, of which each worker carries its share

  double least_s(int lo, int hi) const {
    return least_each_s[static_cast<std::size_t>(lo) * cuts + hi];
  }
};

/// By first cut, last cut and workers: the seconds of the slowest stage; and -1 for one worker
/// less, else the last stage's first layer and workers, as `cut * counts + workers`.
struct LevelTable {
  int starts, cuts, counts;
  double* seconds;
  std::int64_t* choice;

  std::size_t at(int lo, int hi, int workers) const {
    return (static_cast<std::size_t>(lo) * cuts + hi) * counts + workers;
  }
  double value_s(int lo, int hi, int workers) const { return seconds[at(lo, hi, workers)]; }
};

/// Fill a table whose seconds are infinite.
///
/// One stage of layers lo..hi-1 on m workers takes `(unit_s + reduce_each[m] * parameter_bytes) /
/// m`. A worker may stay idle where that is better or a run has fewer layers than workers.
void divide_level(const LevelCosts& costs, const LevelTable& table);

}  // namespace penstock
