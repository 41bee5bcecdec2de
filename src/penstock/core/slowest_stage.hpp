// Cuts a chain over neighbouring devices so that the slowest stage is as fast as possible; the
// recurrence is at `penstock.planners.slowest_stage`.
#pragma once

#include <vector>

#include "costs.hpp"

namespace penstock {

/// The load of a stage on a window beside computing: seconds for each byte that crosses its first
/// and its last cut, and for each byte of its parameters. `replicas` share the messages.
struct WindowLoad {
  int group;  // -1: no window
  int depth, replicas;
  double before_s_per_byte, after_s_per_byte, parameter_s_per_byte;
};

/// A line of windows, `position * widths + number`; the bytes at each cut; the recompute mode. Of
/// equally good ends, the most `balanced` one is taken, or else the first.
struct SlowestStageQuestion {
  int blocks;
  std::vector<int> width;
  std::vector<WindowLoad> windows;
  std::vector<double> crossing_bytes;
  RecomputeChoice recompute;
  bool balanced;
};

/// From a first block and a first cut on: the least slowest stage; the first stage's end and width.
struct SlowestStageState {
  double seconds = kInfinity;
  double floor = kInfinity;  // the least `seconds` over all cuts up to this one
  std::int64_t end = 0, number = 0;
};

class SlowestStageTable {
 public:
  SlowestStageTable(const GroupCosts& costs, SlowestStageQuestion question);

  /// By first block and first cut.
  const std::vector<SlowestStageState>& states() const { return states_; }
  int rows() const { return question_.blocks + 1; }
  int cuts() const { return costs_.cuts(); }

 private:
  void extend(int position, int number, int lo);
  void try_end(SlowestStageState& best, const SlowestStageState* rest, int number, Run run,
               const WindowLoad& window);

  const GroupCosts& costs_;
  const SlowestStageQuestion question_;
  std::vector<SlowestStageState> states_;
};

}  // namespace penstock
