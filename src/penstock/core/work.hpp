// Costs of the parts of a plan. Each part is made once, and every plan that has it uses it.
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "costs.hpp"

namespace penstock {

/// Actions of a stream. `wait` and `hold` take no time and are only in streams of forwards that run
/// beside backwards: they wait for a step, and for actions of the other stream.
enum class Kind { forward, backward, backward_input, backward_weight, recompute, step, wait, hold };
inline constexpr int kTimedKinds = 6;

/// An action of an order, packed into a word by `penstock.simulate.orders`.
struct Action {
  std::int64_t word;

  Kind kind() const { return static_cast<Kind>(word & 7); }
  bool updates() const { return (word & 8) != 0; }  // makes the last gradients before an update
  int instance() const { return static_cast<int>((word >> 4) & 0xfffff); }
  /// The micro-batch; of a wait, how many steps must be done; of a hold, how many actions of the
  /// other stream may be left.
  int number() const { return static_cast<int>(word >> 24); }
};

/// Bytes of one replica of a stage.
struct StageMemory {
  double fixed_bytes, saved_bytes, input_bytes, workspace_bytes;

  bool operator==(const StageMemory&) const = default;
  /// Bytes while nothing runs: `saved` micro-batches have all saved, `inputs` their inputs only.
  double at(int saved, int inputs) const {
    return fixed_bytes + saved * saved_bytes + inputs * input_bytes;
  }
};

/// Micro-batches of each instance on a device while an action of the instance in place `running`
/// runs: the number with everything saved, and the number with inputs only.
struct Holding {
  int running;
  std::vector<std::pair<int, int>> held;
};

/// Peak bytes of a device with replicas of these memories, while an action runs.
double most_bytes(const std::vector<StageMemory>& memories, const std::vector<Holding>& holdings);

/// One replica of a stage: seconds of each kind, and of the parts of its last action that makes
/// gradients (B, or W if the backward is split), cut where the gradients of buckets are complete.
struct ReplicaWork {
  int device, host, rows;
  bool overlaps;          // computes while it communicates
  bool streams_messages;  // sends a message beside the action that makes it
  double device_bytes;    // the memory of its device
  StageMemory memory;
  std::array<double, kTimedKinds> seconds;
  std::vector<double> segments_s;

  double of(Kind kind) const { return seconds[static_cast<int>(kind)]; }
};

/// Gradients that are complete with one segment of the last backward, in equal buckets; seconds and
/// bytes of one of them. Segment -1 is the last one.
struct GradientShare {
  int segment, buckets;
  double seconds, bytes;
};

/// Hosts whose outgoing and incoming ports an all-reduce or a message uses.
struct Ports {
  std::vector<int> outgoing, incoming;
};

/// Gradients that some devices sum after a last backward, and their ports.
struct Gradients {
  std::vector<GradientShare> shares;
  Ports ports;
  std::vector<double> buckets_s = {};  // of every bucket, one after the other

  void add(const GradientShare& share) {
    shares.push_back(share);
    buckets_s.insert(buckets_s.end(), share.buckets, share.seconds);
  }
};

/// One instance of a stage. Segment k of the last backward ends at layer `segment_layers[k]`. The
/// `earlier` stages of its home receive tensors for it.
struct StageWork {
  Run run;
  std::vector<Run> earlier;
  std::vector<ReplicaWork> replicas;
  std::vector<int> segment_layers;
  Gradients gradients;
};

/// The messages of a micro-batch between two replicas: activations down, gradients up.
struct Pair {
  int sender, receiver;
  double forward_s, forward_bytes;
  bool returns;  // there is a message up
  double backward_s, backward_bytes;
  bool port_down, port_up;
};

/// All pairs of a producer and a consumer, sorted.
struct Boundary {
  std::vector<Pair> pairs;
};

/// Parameters that several instances hold: those tied across stages, and all of a mirrored stage.
/// They are complete with the last segment of each.
struct TiedGroup {
  std::vector<int> instances;
  Gradients gradients;
};

struct HostRules {
  int full_speed_devices;  // how many compute at full speed at once; 0: all
  bool half_duplex, separate_links;
};

/// The actions of every stream: `actions[start[k]] .. actions[start[k + 1] - 1]`. Streams are
/// numbered device group after device group.
struct Orders {
  std::vector<std::int64_t> start;
  std::vector<Action> actions;
  int streams_each;         // of a group: one, or two where forwards run beside backwards
  std::vector<int> groups;  // of every instance
  std::vector<int> rounds;  // updates of every instance in all iterations; 0: it has no work
  int micro_batches;        // of all iterations
  int iterations;
  std::vector<std::vector<Holding>> held;  // by each group while actions run

  int group_count() const { return (static_cast<int>(start.size()) - 1) / streams_each; }

  /// Throws unless every action has an instance and a micro-batch that exist.
  void check() const;
};

struct Connection {
  int producer, consumer;  // instances
  const Boundary* boundary;
};

/// The work of a plan without its order. Ties are sorted by their instances.
struct Parts {
  std::vector<const StageWork*> stages;
  std::vector<Connection> connections;
  std::vector<const TiedGroup*> ties;
  std::vector<HostRules> hosts;
  bool in_order;  // a device's messages pass one after another, in the planned order
};

/// Return whether every device has enough memory for all its replicas.
bool fits(const Parts& parts, const Orders& orders);

}  // namespace penstock
