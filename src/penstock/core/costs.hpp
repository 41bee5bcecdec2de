// The cost model: what stages, messages and gradients cost, as `tests/reference/stage_formula.py` and
// `tests/reference/part_formulas.py` say.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

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

/// The cost of a run, from sums up to each cut; never below zero by rounding.
inline double sum_of(const std::vector<Affine>& sums, Run run, double rows) {
  return std::max(0.0, (sums[run.hi] - sums[run.lo]).at(rows));
}

/// A table with an entry for each run.
template <class T>
class PerRun {
 public:
  PerRun() = default;
  PerRun(int cuts, std::vector<T> values) : cuts_(cuts), values_(std::move(values)) {}
  bool empty() const { return values_.empty(); }
  const std::vector<T>& values() const { return values_; }
  const T& operator[](Run run) const { return values_[run.lo * cuts_ + run.hi]; }

 private:
  int cuts_ = 0;
  std::vector<T> values_;
};

/// Latency and seconds a byte of an all-reduce. Whatever counts gradient sums calls `of`.
struct ReduceCost {
  double latency_s, s_per_byte;

  double of(double bytes) const { return factor * (latency_s + s_per_byte * bytes); }

  /// Factor on the time of all of them. Tests change it, to see who counts them by a formula of its
  /// own.
  static inline double factor = 1;
};

/// Memory on a chip, and beyond it. A stage with more parameters than the chip holds reads them in
/// every action.
struct ChipMemory {
  double bytes = 0, off_chip_bytes_per_s = 0;  // 0: there is none beyond, and no limit

  bool operator==(const ChipMemory&) const = default;

  /// Seconds that an action takes at least.
  double read_s(double parameter_bytes) const {
    const bool reads = off_chip_bytes_per_s > 0 && parameter_bytes > bytes;
    return reads ? parameter_bytes / off_chip_bytes_per_s : 0;
  }
};

/// Equal replicas of a group.
struct ReplicaKind {
  double rows, speed, memory_bytes;
  ChipMemory chip;
  int workspace = -1;  // the number of its table

  bool operator==(const ReplicaKind&) const = default;
};

struct Group {
  std::vector<ReplicaKind> kinds;
  double crowding;  // how much slower each device is when all of them compute
  int replicas;
  double step_s_per_byte;
  std::vector<ReduceCost> all_reduces;  // the algorithms, of which the fastest counts

  double all_reduce_s(double bytes) const;
  /// The longest of the replicas' times.
  double slowest_s(Affine seconds) const;
  /// Seconds of the optimizer step, of which each device that divides parameters does its share.
  double step_s(double parameter_bytes, bool divides) const {
    return step_s_per_byte * parameter_bytes / (divides ? replicas : 1);
  }
};

/// A pass over layers whose devices divide their parameters: a layer is gathered, it computes, its
/// gradients are scattered. Messages go in order beside computing.
///
///     messages   gather 0, gather 1, gather 2, scatter 0, gather 3, scatter 1, ...
///     computing            layer 0,  layer 1,  layer 2, ...
///
/// One layer is gathered ahead of the one that computes, so two are whole at a time.
class GatheredPass {
 public:
  void add(double gather_s, double compute_s, double scatter_s) {
    // The layer two before has computed, so its place is free, and its gradients are there.
    messages_s_ = std::max(messages_s_, before_s_) + waiting_s_ + gather_s;
    waiting_s_ = std::exchange(last_s_, scatter_s);
    before_s_ = std::exchange(computed_s_, std::max(computed_s_, messages_s_) + compute_s);
  }

  /// Seconds until all have computed and all gradients are scattered.
  double seconds() const {
    const double sent_s = std::max(messages_s_, before_s_) + waiting_s_;
    return std::max(sent_s, computed_s_) + last_s_;
  }

 private:
  double messages_s_ = 0, computed_s_ = 0, before_s_ = 0;  // ends; of the layer before the last
  double waiting_s_ = 0, last_s_ = 0;  // scatters of the layer before the last, and of the last
};

/// Sizes that `penstock.cluster.collectives` defines.
struct ReduceRules {
  double bucket_bytes, statistic_bytes, statistics_s;
};

/// Seconds of a message of some tensors, each of which has the latency of the link.
inline double message_s(int tensors, double latency_s, double bytes, double bytes_per_s) {
  return tensors * latency_s + bytes / bytes_per_s;
}

/// State that the devices of a stage shard (`penstock.plan.plan.SHARDINGS`).
enum class Sharding { none, optimizer, parameters };

/// Bytes that each of some devices holds all the time: parameters, gradients, optimizer state.
///
/// `copies` are those of parameters and gradients, `state` the optimizer's bytes for each byte of
/// parameters. Where parameters are divided, two layers that follow one another are whole at a time,
/// with their gradients: `two_layers` are the bytes of the two largest.
inline double held_bytes(Sharding sharding, double devices, double parameters, double two_layers,
                         double copies, double state) {
  if (sharding == Sharding::parameters)
    return parameters * ((copies + state) / devices) + two_layers * 2;
  return parameters * (copies + (sharding == Sharding::optimizer ? state / devices : state));
}

/// Recompute of stages: where memory requires it, all of them, none.
enum class RecomputeChoice { where_needed, all, none };

/// A stage on its devices: it does not fit, keeps its activations, or recomputes them.
enum class Fit { too_large = -1, keeps, recomputes };

/// Sums of the costs of layers, up to each cut.
struct LayerSums {
  std::vector<Affine> forward, backward, saved;
  std::vector<Affine> norms;  // batch normalisations, and their channels
  bool again;                 // each backward begins with the forward
  ReduceRules rules;

  /// Seconds that replicas wait for batch norm's statistics in a micro-batch's forward or backward.
  ///
  /// Each normalisation sums two tables. That of the forward has a row for each replica: mean and
  /// variance of each channel, and a count. That of the backward has two numbers for each channel.
  double norms_s(const Group& group, Run run, bool forward) const;

  /// Seconds of a pass of a group that divides parameters. Of each layer the slowest device counts,
  /// because the others wait for its messages. Layers are what is between neighbouring cuts;
  /// `bytes_up_to(k)` are the parameters of those from the first one of the run up to cut k.
  template <class Bytes>
  double gathered_s(const Group& group, Run run, bool is_forward, Bytes bytes_up_to) const {
    const std::vector<Affine>& sums = is_forward ? forward : backward;
    GatheredPass pass;
    for (int k = 0; k < run.hi - run.lo; ++k) {
      const int layer = is_forward ? run.lo + k : run.hi - 1 - k;
      const double bytes = bytes_up_to(layer + 1) - bytes_up_to(layer);
      const double half_s = bytes > 0 ? group.all_reduce_s(bytes) / 2 : 0;
      pass.add(half_s, group.slowest_s(sums[layer + 1] - sums[layer]), is_forward ? 0 : half_s);
    }
    return pass.seconds();
  }
};

/// The costs of the layers of a chain between some cuts, with tables of all runs of them.
struct RunCosts : LayerSums {
  std::vector<Affine> down, up;  // bytes that cross each cut, and of their gradients
  PerRun<double> parameter_bytes;       // what layers share counts once
  PerRun<double> held_bytes;            // all the time: parameters, gradients, optimizer state
  PerRun<double> whole_bytes, divided_bytes;  // the same of several devices that divide it, or empty
  bool gathers;                         // they divide parameters and gradients, too
  PerRun<Affine> input_bytes;           // tensors that a run reads from earlier layers

  int cuts() const { return static_cast<int>(forward.size()); }

  /// Bytes that each of some devices holds all the time.
  double held(Run run, int replicas) const {
    if (replicas < 2 || whole_bytes.empty()) return held_bytes[run];
    return whole_bytes[run] + divided_bytes[run] / replicas;
  }

  /// Seconds of a pass on the slowest replica, with the messages of layers that are divided, at full
  /// speed and without batch norm's statistics.
  double pass_s(const Group& group, Run run, bool is_forward) const;
  /// Seconds of one forward on the slowest replica.
  double forward_s(const Group& group, Run run) const;
  /// Seconds of one full backward on the slowest replica, without recompute.
  double backward_s(const Group& group, Run run) const;
  /// Seconds of a forward and a full backward on the slowest replica, without recompute.
  double micro_batch_s(const Group& group, Run run) const;
  /// Seconds of the optimizer step.
  double step_s(const Group& group, Run run) const {
    return group.step_s(parameter_bytes[run], gathers);
  }
  /// Seconds after a stage's last backward: gradient all-reduce and optimizer step.
  double after_s(const Group& group, Run run) const;
};

/// The costs of a chain on groups of devices that are known before.
struct GroupCosts : RunCosts {
  std::vector<PerRun<double>> workspaces;  // by number of rows
  std::vector<Group> groups;

  /// Peak bytes of a replica with `depth` micro-batches in flight.
  double needed_bytes(const Group& group, const ReplicaKind& kind, Run run, int depth,
                      bool recompute) const;
  /// The fit of a stage, as `choice` requires it; it keeps its activations where both fit.
  Fit fit(const Group& group, Run run, int depth, RecomputeChoice choice) const;

 private:
  bool fits(const Group& group, Run run, int depth, bool recompute) const;
};

}  // namespace penstock
