// The cost model: what stages cost, as `tests/reference/stage_formula.py` and the simulator say.
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

/// A table with an entry for each run.
template <class T>
class PerRun {
 public:
  PerRun() = default;
  PerRun(int cuts, std::vector<T> values) : cuts_(cuts), values_(std::move(values)) {}
  bool empty() const { return values_.empty(); }
  const T& operator[](Run run) const { return values_[run.lo * cuts_ + run.hi]; }

 private:
  int cuts_ = 0;
  std::vector<T> values_;
};

/// Latency and seconds a byte of an all-reduce. Whatever counts gradient sums asks `of`.
struct ReduceCost {
  double latency_s, s_per_byte;

  double of(double bytes) const { return factor * (latency_s + s_per_byte * bytes); }

  /// How many times as long all of them take. Tests change it, to see who counts them by a formula
  /// of its own.
  static inline double factor = 1;
};

/// Memory on a chip, and beyond it. A stage with more parameters than the chip holds reads them in
/// every action.
struct ChipMemory {
  double bytes = 0, off_chip_bytes_per_s = 0;  // 0: there is none beyond, and no limit

  /// Seconds that an action takes at least.
  double read_s(double parameter_bytes) const {
    const bool reads = off_chip_bytes_per_s > 0 && parameter_bytes > bytes;
    return reads ? parameter_bytes / off_chip_bytes_per_s : 0;
  }
};

/// Replicas of a group that are alike.
struct ReplicaKind {
  double rows, speed, memory_bytes;
  ChipMemory chip;
  int workspace = -1;  // the number of its table
};

struct Group {
  std::vector<ReplicaKind> kinds;
  double crowding;  // how much slower each device is when all of them compute
  int replicas;
  double step_s_per_byte;
  std::vector<ReduceCost> all_reduces;  // the algorithms, of which the fastest counts

  double all_reduce_s(double bytes) const;
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

/// Whether stages recompute: where memory asks for it, all of them, none.
enum class RecomputeChoice { where_needed, all, none };

/// A stage on its devices: it does not fit, keeps its activations, or recomputes them.
enum class Fit { too_large = -1, keeps, recomputes };

/// The costs of the layers of a chain between some cuts. Sums are those up to each cut.
struct RunCosts {
  std::vector<Affine> forward, backward, saved;
  std::vector<Affine> norms;            // batch normalisations, and their channels
  PerRun<double> parameter_bytes;       // what layers share counts once
  PerRun<double> held_bytes;            // all the time: parameters, gradients, optimizer state
  PerRun<double> whole_bytes, divided_bytes;  // the same of several devices that divide it, or empty
  bool gathers;                         // they divide parameters and gradients, too
  bool again;                           // each backward begins with the forward
  PerRun<Affine> input_bytes;           // tensors that a run reads from earlier layers
  ReduceRules rules;

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
    const int shares = gathers ? group.replicas : 1;
    return group.step_s_per_byte * parameter_bytes[run] / shares;
  }
  /// Seconds after a stage's last backward: gradient all-reduce and optimizer step.
  double after_s(const Group& group, Run run) const;
  /// Seconds that replicas wait for batch norm's statistics, as `collectives.norm_sums_s`.
  double norms_s(const Group& group, Run run, bool forward) const;
};

/// The costs of a chain on groups of devices that are known before.
struct GroupCosts : RunCosts {
  std::vector<Affine> down, up;  // bytes that cross each cut, and of their gradients
  std::vector<PerRun<double>> workspaces;  // by number of rows
  std::vector<Group> groups;

  /// Peak bytes of a replica with `depth` micro-batches in flight.
  double needed_bytes(const Group& group, const ReplicaKind& kind, Run run, int depth,
                      bool recompute) const;
  /// How a stage fits, as `choice` asks for it; it keeps its activations where both fit.
  Fit fit(const Group& group, Run run, int depth, RecomputeChoice choice) const;

 private:
  bool fits(const Group& group, Run run, int depth, bool recompute) const;
};

}  // namespace penstock
