// SPP's dynamic program (PRM), whose recurrences are at `penstock.planners.spp.partition`.
#pragma once

#include <vector>

#include "transfers.hpp"

namespace penstock {

/// Parameters of a table. A window of the line is `position * widths + number`, its group of
/// devices in `groups`, -1 where the line ends before it does; `depths[k]` are the micro-batches in
/// flight of a stage with k stages from itself to the end.
struct SppQuestion {
  int stages, blocks;
  std::vector<int> groups, width, depths;
  int micro_batches;
  RecomputeChoice recompute;
  bool drains;

  int widths() const { return static_cast<int>(width.size()); }
};

/// The best plan of k stages from a cut on, the first of them on a window.
struct SppState {
  double seconds = kInfinity;  // the least objective; infinite where there is no plan
  double passed_s = 0;         // until one micro-batch has passed all stages and channels
  double slowest_s = 0;        // the slowest stage or channel
  std::int64_t end = 0;        // the cut where the first stage ends
  std::int64_t next_number = 0;  // the number of the width of the window behind it
  std::int64_t recompute = 0;    // whether the first stage recomputes
};

class SppTable {
 public:
  SppTable(const GroupCosts& costs, const Network& network, SppQuestion question);

  /// By stages, first cut, first block and number of the first width.
  const std::vector<SppState>& states() const { return states_; }
  int cuts() const { return costs_.cuts(); }
  const SppQuestion& question() const { return question_; }

 private:
  struct Window {
    int position, number;
  };

  /// A first stage that ends at a cut.
  struct Stage {
    int end;
    bool recomputes;
    double busy_s;  // of a micro-batch
    double own_s;   // of all, with what follows its last backward
  };

  void set_moves(Window window);
  void extend(Window window, int stages, int lo);
  void try_end(SppState& state, const SppState* after, const Stage& stage);
  Stage stage_of(const Group& group, Run run, int stages) const;
  double least_own_s(const Group& group, Run run) const;
  void set_least(int stages, int position);
  SppState& state(int stages, int lo, Window window);
  std::size_t behind(int stages, int position) const;

  const GroupCosts& costs_;
  const SppQuestion question_;
  Transfers transfers_;
  std::vector<SppState> states_;
  // The least objective over the widths, by stages, first block and first cut; and also over all
  // cuts up to the first cut, so that it never grows with the cut.
  std::vector<double> least_, floor_;
  // Seconds from a window to each window behind it, by width and cut: both directions together, and
  // the busier one.
  std::vector<double> round_trip_s_, busier_s_;
  std::vector<MessageLoad> down_, up_;
};

}  // namespace penstock
