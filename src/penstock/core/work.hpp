// What the parts of a plan cost. Python makes each part once, and every plan that has it uses it.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace penstock {

/// What a stream does. `wait` and `hold` take no time and are only in streams of forwards that run
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

/// One replica of a stage: seconds of each kind, and of the parts of its last backward, which is
/// cut where the gradients of buckets are complete.
struct ReplicaTimes {
  int device, host;
  bool overlaps;          // computes while it communicates
  bool streams_messages;  // sends a message beside the action that makes it
  std::array<double, kTimedKinds> seconds;
  std::vector<double> segments_s;

  double of(Kind kind) const { return seconds[static_cast<int>(kind)]; }
};

/// One instance of a stage. Segment k of the last backward completes `buckets_of_segment[k]` of
/// the buckets, whose all-reduces take `buckets_s`.
struct StageTimes {
  std::vector<ReplicaTimes> replicas;
  std::vector<int> buckets_of_segment;
  std::vector<double> buckets_s;
  std::vector<int> outgoing, incoming;  // hosts whose ports the all-reduces use
};

/// The messages of a micro-batch between two replicas: activations forward, gradients back.
struct PairTimes {
  int sender, receiver;
  double forward_s, backward_s;
  bool returns, forward_uses_port, backward_uses_port;
};

struct BoundaryTimes {
  std::vector<PairTimes> pairs;
};

/// Parameters that several instances hold. They are complete with the last segment of each.
struct TieTimes {
  std::vector<int> instances;
  std::vector<double> buckets_s;
  std::vector<int> outgoing, incoming;
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

  int group_count() const { return (static_cast<int>(start.size()) - 1) / streams_each; }

  /// Throws unless every action has an instance and a micro-batch that exist.
  void check() const;
};

struct Connection {
  int producer, consumer;  // instances
  const BoundaryTimes* boundary;
};

/// The work of a plan without its order. Ties are sorted by their instances.
struct Parts {
  std::vector<const StageTimes*> stages;
  std::vector<Connection> connections;
  std::vector<const TieTimes*> ties;
  std::vector<HostRules> hosts;
  bool in_order;  // a device's messages pass one after another, in the planned order
};

}  // namespace penstock
