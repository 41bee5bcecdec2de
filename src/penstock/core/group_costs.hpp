// The costs of runs of layers on groups of devices that are known before, and of transfers between
// them: `penstock.plan.cost` for planners that ask for millions.
#pragma once

#include <algorithm>
#include <vector>

#include "costs.hpp"

namespace penstock {

/// Latency and seconds a byte of an all-reduce.
struct ReduceCost {
  double latency_s, s_per_byte;

  double of(double bytes) const { return latency_s + s_per_byte * bytes; }
};

/// Replicas of a group that are alike.
struct ReplicaKind {
  double rows, speed, memory_bytes;
  int workspace;  // the number of its table
};

struct Group {
  std::vector<ReplicaKind> kinds;
  double crowding;  // how much slower each device is when all of them compute
  int replicas;
  double step_s_per_byte;
  std::vector<ReduceCost> all_reduces;  // the algorithms, of which the fastest counts

  double all_reduce_s(double bytes) const;
};

/// Whether stages recompute: where memory asks for it, all of them, none.
enum class RecomputeChoice { where_needed, all, none };

/// A stage on its devices: it does not fit, keeps its activations, or recomputes them.
enum class Fit { too_large = -1, keeps, recomputes };

/// The layers of a chain between some cuts, on groups of devices. Sums are those up to each cut.
struct GroupCosts {
  std::vector<Affine> forward, backward, saved, norms;
  std::vector<Affine> down, up;  // bytes that cross each cut, and of their gradients
  PerRun<double> parameter_bytes, held_bytes;
  PerRun<Affine> input_bytes;
  std::vector<PerRun<double>> workspaces;  // by number of rows
  std::vector<Group> groups;
  ReduceRules rules;

  int cuts() const { return static_cast<int>(forward.size()); }

  /// Seconds of one forward on the slowest replica.
  double forward_s(const Group& group, Run run) const;
  /// Seconds of one full backward on the slowest replica, without recompute.
  double backward_s(const Group& group, Run run) const;
  /// Seconds of a forward and a full backward on the slowest replica, without recompute.
  double micro_batch_s(const Group& group, Run run) const;
  /// Seconds after a stage's last backward: gradient all-reduce and optimizer step.
  double after_s(const Group& group, Run run) const;
  /// Peak bytes of a replica with `depth` micro-batches in flight.
  double needed_bytes(const ReplicaKind& kind, Run run, int depth, bool recompute) const;
  /// How a stage fits, as `choice` asks for it; it keeps its activations where both fit.
  Fit fit(const Group& group, Run run, int depth, RecomputeChoice choice) const;

 private:
  double slowest_s(const Group& group, Affine seconds) const;
  double norms_s(const Group& group, Run run, bool forward) const;
  bool fits(const Group& group, Run run, int depth, bool recompute) const;
};

/// Links between devices, and the devices of each group with their rows.
struct Network {
  struct Member {
    int device, rows;
  };

  int devices, hosts;
  std::vector<int> host;  // of each device
  std::vector<double> latency_s, s_per_byte;  // of each link, `source * devices + target`
  std::vector<std::uint8_t> uses_port;
  std::vector<std::vector<Member>> groups;
};

/// The load of an engine or a port by the messages of a transfer: seconds of latency, and seconds
/// for each byte that does not depend on rows, and for each byte of a row.
struct MessageLoad {
  double latency_s = 0, s_per_byte = 0, s_per_row_byte = 0;

  double seconds(Affine bytes) const {
    return latency_s + s_per_byte * bytes.fixed + s_per_row_byte * bytes.each;
  }
  /// Whether no term is less than that of another load.
  bool outweighs(const MessageLoad& other) const {
    return latency_s >= other.latency_s && s_per_byte >= other.s_per_byte &&
           s_per_row_byte >= other.s_per_row_byte;
  }
};

/// Computes the transfers between groups.
class Transfers {
 public:
  explicit Transfers(const Network& network)
      : network_(network), busy_(2 * (network.devices + network.hosts)) {}

  /// The loads of the busiest resources of a transfer, whose messages are those of
  /// `penstock.plan.cost.split_concat_s`.
  void loads(int sender, int receiver, std::vector<MessageLoad>& found);

  /// Seconds of a transfer of so many bytes.
  static double seconds(const std::vector<MessageLoad>& loads, Affine bytes);

 private:
  void add_message(int resource, std::size_t link, int rows);
  void keep(const MessageLoad& load, std::vector<MessageLoad>& found) const;
  int engine_out(int device) const { return device; }
  int engine_in(int device) const { return network_.devices + device; }
  int port_out(int device) const { return 2 * network_.devices + network_.host[device]; }
  int port_in(int device) const { return port_out(device) + network_.hosts; }

  const Network& network_;
  std::vector<MessageLoad> busy_;
};

}  // namespace penstock
