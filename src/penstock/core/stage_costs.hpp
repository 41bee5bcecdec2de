// Costs of a stage on any devices, since walks change the sets of devices at every step: rows,
// memory, and when gradients are summed.
#pragma once

#include <span>
#include <vector>

#include "layers.hpp"

namespace penstock {

/// A profile on a cluster, with tables of all runs.
struct SearchCosts : Layers, Hardware {
  RunCosts runs;
};

/// Seconds of a stage for a micro-batch, and of its all-reduce; its memory.
///
/// Bytes are those of the replica with the most rows, and `memory` is the least of any.
struct StageCost {
  double forward_s = 0, backward_s = 0;  // of the slowest replica
  double weight_s = 0;                   // the weights' part of a split backward
  double after_s = 0;    // after the last backward: the rest of the all-reduce, the step
  double reduced_s = 0;  // in which the all-reduce occupies engines
  // The last bucket that is complete before the last backward ends: how long before, and how long
  // after that it occupies engines.
  double early_s = 0, blocked_s = 0;
  double held = 0, workspace = 0;  // all the time, and while it computes
  double saved = 0, inputs = 0;    // of each micro-batch, without recompute and with it
  double memory = kInfinity;
  int kept = 0, leaner = 0;  // most in flight that fit without recompute, and with it; 0 for none
};

/// Seconds of a stage for a micro-batch on its slowest replica.
///
/// `whole_s` may be less than forward plus backward, because different replicas may be slowest in
/// the two. `weight_s` is the weights' part of the backward. `after_s`: the all-reduce and the
/// optimizer step, as if none of it passed beside the backward.
struct StageSeconds {
  double forward_s, backward_s, weight_s, whole_s, after_s;
};

/// Computes the costs of stages, one after the other.
class StageCosts {
 public:
  /// `split` backwards have the gradients of weights at their end.
  StageCosts(const SearchCosts& costs, bool split) : costs_(costs), split_(split) {}

  /// The cost of layers on some devices; fills in the rows of each.
  StageCost of(std::span<const int> devices, std::span<int> rows, Run run, int size,
               int micro_batches);

  /// The seconds of layers on devices that have these rows and algorithms of an all-reduce.
  StageSeconds seconds(std::span<const int> devices, std::span<const int> rows, Run run,
                       std::vector<ReduceCost> all_reduces);

  /// Rows of each replica in proportion to speed, as `penstock.plan.row_split.split_rows`.
  void split_rows(std::span<const int> devices, std::span<int> rows, int size);

 private:
  void set_depths(StageCost& cost, std::span<const int> devices, std::span<const int> rows,
                  Run run, int micro_batches) const;
  void set_reduce_costs(std::span<const int> devices);
  double buckets_s(double bytes) const;
  void add_buckets(StageCost& cost, Run run) const;
  double slowest_s(const std::vector<Affine>& sums, Run run) const;
  double weight_s(Run run) const;

  const SearchCosts& costs_;
  const bool split_;
  Group group_{};
  std::vector<int> devices_in_order_, first_of_hosts_;
  std::vector<double> rest_;
};

}  // namespace penstock
