// What a stage costs: rows, memory, compute, all-reduce. The rules are those of
// `penstock.plan.cost` and of the simulator.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "work.hpp"

namespace penstock {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// A cost with a part for each row of a micro-batch.
struct Affine {
  double fixed = 0, each = 0;

  double at(double rows) const { return fixed + each * rows; }
  friend Affine operator+(Affine a, Affine b) { return {a.fixed + b.fixed, a.each + b.each}; }
  friend Affine operator-(Affine a, Affine b) { return {a.fixed - b.fixed, a.each - b.each}; }
};

/// The layers between two cuts: lo .. hi - 1.
struct Run {
  int lo, hi;

  bool operator==(const Run&) const = default;
};

/// A table with an entry for each run.
template <class T>
class PerRun {
 public:
  PerRun() = default;
  PerRun(int cuts, std::vector<T> values) : cuts_(cuts), values_(std::move(values)) {}
  const T& operator[](Run run) const { return values_[run.lo * cuts_ + run.hi]; }

 private:
  int cuts_ = 0;
  std::vector<T> values_;
};

/// The costs of the layers of a profile; sums are those up to each cut.
struct LayerCosts {
  std::vector<Affine> forward, backward, saved;
  std::vector<Affine> norms;  // batch normalisations, and their channels
  std::vector<Affine> workspace;
  std::vector<double> parameter_bytes;  // of each layer alone
  PerRun<double> run_parameter_bytes;   // what layers share counts once
  PerRun<double> held_bytes;            // all the time: parameters, gradients, optimizer state
  PerRun<Affine> input_bytes;           // tensors that a run reads from earlier layers
  double step_s_per_byte;
};

/// A tensor that one layer makes and another one reads.
struct Tensor {
  int producer, consumer, number;
  Affine bytes, gradient_bytes;
};

struct Machine {
  double speed, memory_bytes;
  int host;
};

/// The links from each device to each device, row after row. They belong to Python.
struct Links {
  const double *bytes_per_s, *both_ways_bytes_per_s, *latency_s;
  const std::uint8_t* uses_port;
  int devices;

  std::size_t of(int source, int target) const {
    return static_cast<std::size_t>(source) * devices + target;
  }
};

/// Sizes that `penstock.cluster.collectives` defines.
struct ReduceRules {
  double bucket_bytes, statistic_bytes, statistics_s;
};

/// A profile on a cluster. Tensors are sorted by number and consumer.
struct SearchCosts {
  LayerCosts layers;
  std::vector<Tensor> tensors;
  std::vector<Machine> devices;
  std::vector<HostRules> hosts;
  Links links;
  ReduceRules rules;
};

/// Seconds of a stage for a micro-batch, and of its all-reduce; its memory.
struct StageCost {
  double forward_s = 0, backward_s = 0;  // of the slowest replica
  double after_s = 0;    // after the last backward: the rest of the all-reduce, the step
  double reduced_s = 0;  // in which the all-reduce occupies engines
  int kept = 0, leaner = 0;  // most in flight that fit without recompute, and with it; 0 for none
};

/// Computes the costs of stages, one after the other.
class StageCosts {
 public:
  explicit StageCosts(const SearchCosts& costs) : costs_(costs) {}

  /// The cost of layers on some devices; fills in the rows of each.
  StageCost of(std::span<const int> devices, std::span<int> rows, Run run, int size,
               int micro_batches);

  /// Rows of each replica in proportion to speed, as `penstock.plan.row_split.split_rows`.
  void split_rows(std::span<const int> devices, std::span<int> rows, int size);

 private:
  /// Latency and seconds a byte of an all-reduce.
  struct ReduceCost {
    double latency_s, s_per_byte;
    double of(double bytes) const { return latency_s + s_per_byte * bytes; }
  };

  /// The replica that ends a backward last, and so completes buckets last.
  struct Slowest {
    int rows = 0;
    double factor = 0;     // of its seconds
    double crowding = 0;   // of what all replicas wait for together
  };

  double crowding(std::span<const int> devices) const;
  void set_depths(StageCost& cost, std::span<const int> devices, std::span<const int> rows,
                  Run run, int micro_batches) const;
  void set_reduce_costs(std::span<const int> devices);
  double reduce_s(double bytes) const { return std::min(ring_.of(bytes), by_host_.of(bytes)); }
  double norms_s(Run run, int replicas) const;
  double after_backward_s(const Slowest& slowest, Run run, double backward_s) const;

  const SearchCosts& costs_;
  ReduceCost ring_{}, by_host_{};
  std::vector<int> devices_in_order_, first_of_hosts_;
  std::vector<double> rest_;
};

}  // namespace penstock
