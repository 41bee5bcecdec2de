// What a stage costs on any devices, since walks change the sets of devices at every step: rows,
// memory, and when gradients are summed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "costs.hpp"
#include "work.hpp"

namespace penstock {

/// A tensor that one layer makes and another one reads.
struct Tensor {
  int producer, consumer, number;
  Affine bytes, gradient_bytes;
};

struct Machine {
  double speed, memory_bytes;
  int host;
  ChipMemory chip;
};

/// The links from each device to each device, row after row. They belong to Python.
struct Links {
  const double *bytes_per_s, *both_ways_bytes_per_s, *latency_s;
  const std::uint8_t* uses_port;
  int devices;
  double sum_step_s;  // the least seconds of a step of an all-reduce

  std::size_t of(int source, int target) const {
    return static_cast<std::size_t>(source) * devices + target;
  }
};

/// A profile on a cluster. Tensors are sorted by number and consumer.
struct SearchCosts {
  RunCosts runs;
  std::vector<Affine> weight;           // the gradients of weights, a part of backwards
  std::vector<Affine> workspace;        // of each layer
  std::vector<double> parameter_bytes;  // of each layer alone
  double step_s_per_byte;
  std::vector<Tensor> tensors;
  std::vector<Machine> devices;
  std::vector<HostRules> hosts;
  Links links;
};

/// Bytes that a replica keeps of a micro-batch, without recompute and with it, and needs while it
/// computes.
struct RunBytes {
  double saved, inputs, workspace;
};
RunBytes run_bytes(const SearchCosts& costs, Run run, double rows);

/// Call `each(s, t, tensor)` for every tensor that stage s sends a later stage t: once, however many
/// of its layers read it. `stage_of_layer` is overwritten.
template <class Each>
void for_sent_tensors(const SearchCosts& costs, const std::vector<int>& cuts,
                      std::vector<int>& stage_of_layer, Each each) {
  stage_of_layer.resize(cuts.back());
  for (int s = 0; s + 1 < static_cast<int>(cuts.size()); ++s)
    std::fill(stage_of_layer.begin() + cuts[s], stage_of_layer.begin() + cuts[s + 1], s);
  int last_tensor = -1, last_stage = -1;
  for (const Tensor& tensor : costs.tensors) {
    const int s = stage_of_layer[tensor.producer], t = stage_of_layer[tensor.consumer];
    if (s == t || (tensor.number == last_tensor && t == last_stage)) continue;
    last_tensor = tensor.number;
    last_stage = t;
    each(s, t, tensor);
  }
}

/// Places of a group in an order of devices: first .. last - 1.
struct Places {
  int first, last;
};

/// Call `each(i, j, shared)` for all places i and j that have rows of a micro-batch in common.
template <class Each>
void for_shared_rows(const std::vector<int>& rows, Places from, Places to, Each each) {
  int i = from.first, j = to.first, left_i = rows[i], left_j = rows[j];
  while (i < from.last && j < to.last) {
    const int shared = std::min(left_i, left_j);
    each(i, j, shared);
    left_i -= shared;
    left_j -= shared;
    if (left_i == 0 && ++i < from.last) left_i = rows[i];
    if (left_j == 0 && ++j < to.last) left_j = rows[j];
  }
}

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
  double crowding(std::span<const int> devices) const;
  void set_depths(StageCost& cost, std::span<const int> devices, std::span<const int> rows,
                  Run run, int micro_batches) const;
  void set_group(std::span<const int> devices, std::span<const int> rows);
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
