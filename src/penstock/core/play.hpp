// The rules of the simulator.
//
//   compute     a device has one stream, or two if forwards run beside backwards; actions start in
//               schedule order once their inputs are there (a forward beside backwards once all
//               actions before it have ended); the optimizer steps once the device's gradients are
//               reduced (those of all devices, if steps go together), and the next iteration
//               follows the step
//   shares      while both streams of a device compute, they share it in proportion to the seconds
//               of their whole actions; one alone has the whole device
//   slots       of the devices of a host, `full_speed_devices` compute at full speed; if more
//               compute, all of them slow down equally: rate = slots / computing
//   messages    are sent when their action has ended; a message occupies the sender's send engine,
//               the receiver's receive engine and, between hosts, both ports, all at once; of those
//               that wait, the one that was ready first starts first; a blocked one does not block
//               others; stages on one device exchange no messages; of instances that take
//               micro-batches in turn, only those that work on one exchange its messages
//   in order    if messages go in order, each device has one communicator: it sends or receives one
//               message at a time, in the planned order (`penstock.schedule.message_order`)
//   streaming   a device that streams its messages requests to send one when the action that makes
//               it starts; it arrives once both the action and its transfer have ended
//   reductions  a bucket occupies both engines of its members (and ports) once all of them have its
//               gradients; messages that can start go first
//   turns       half-duplex: both engines of a device are one, and so are both ports of a host; a
//               device that does not overlap starts no transfer while it computes, and computes
//               nothing during a transfer nor while a message of its own waits to be sent
//   links       on a host with separate links, a message between two of its devices occupies the
//               link from one to the other (half-duplex: between them) instead of engines, and a
//               device that does not overlap may run several transfers at once; reductions use the
//               engines, as if on links that no message of the host uses
//
// Events at the same time are handled in the order: streams, messages, reductions.
// `tests/reference/plain_simulator.py` plays by the same rules in plain Python.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "events.hpp"
#include "lists.hpp"
#include "work.hpp"

namespace penstock {

struct Span {
  double start_s = 0, end_s = 0;
};

/// The spans of a play: all actions and steps, stream after stream; of the micro-batches of each
/// message; of the buckets of each reduction, round after round.
struct Spans {
  std::vector<Span> actions, items;
  double end_s = 0;
};

class Play {
 public:
  Play(const Parts& parts, const Orders& orders, Spans* spans = nullptr,
       bool steps_together = false);

  /// Play to the end, or to a deadlock; returns the time of the last event in seconds.
  double run();

 private:
  /// Values of a busy resource. A transfer starts only if all of its resources lack the lowest bit;
  /// where several transfers may run at once, each adds `kOneOfSeveral` instead.
  static constexpr int kComputes = 1, kTransfers = 3, kOneOfSeveral = 2;

  /// An engine, port or link that one transfer occupies at a time, or a compute stream.
  struct Resource {
    int busy = 0;
    int waiting = 0;  // items in the queues of its lanes
    bool several = false;
  };

  struct Device {
    int host = 0;
    bool overlaps = true;
    double step_s = 0;
    int buckets = 0, buckets_left = 0;  // sums that a step waits for
    int steps_ready = 0, steps_done = 0;
    int unsent = 0;  // waiting messages, if it does not compute beside them
    int turn = 0;    // the place in `turns_` of what its communicator carries next
  };

  struct Stream {
    int device, replica;      // the replica's place in its stage
    int next, end;            // its actions in the orders
    std::size_t first_span;   // that of action 0 of the orders
    int segment = 0;          // of the running last backward
    double seconds = 0, claim_s = 0;         // of its piece; of the whole action, for its share
    double finish = 0, left = 0, since = 0;  // by the clock of its host
  };

  struct Replica {
    const ReplicaWork* work;
    int device, first_segment;
    int first_sent;  // its list in `sent_` after backwards; the next one: after forwards
    std::array<std::size_t, 3> inputs;  // rows of `inputs_`: forwards, backwards, its own forwards
  };

  struct Host {
    int slots, computing = 0;
    double progress = 0, since_s = 0;  // what a computing device has done by `since_s`
    std::vector<int> streams = {};
  };

  struct Message {
    double seconds;
    int sender, receiver;     // a device, and the stream that waits for it
    int from, to;             // instances; only what both work on is sent
    std::size_t input;        // the row of `inputs_` that it lowers
    bool forward, uses_port, streams;  // streams: passes beside the action that makes it
  };

  struct Reduction {
    const Gradients* gradients;
    int first_bucket;
    int working = 0, rounds = 0;  // members that give gradients; how often the buckets are summed
    std::vector<int> members = {};  // devices
  };

  struct Bucket {
    int reduction, members_left, rounds_done = 0;
  };

  struct Waiting {
    int item;
    std::int64_t age;
  };

  /// A lane, for items one after the other: the micro-batches of a message, or the buckets of a
  /// reduction in every round. Lanes are numbered: messages, then reductions.
  struct Lane {
    int current = -1;
    std::size_t head = 0, first_span = 0;
    std::vector<Waiting> queue = {};
  };

  // Assembly.
  std::vector<int> make_devices();
  void make_replicas(const std::vector<int>& first_device);
  void make_messages();
  bool works(int instance, int number) const {
    return works_[static_cast<std::size_t>(instance) * orders_.micro_batches + number];
  }
  void make_reductions();
  void start_reduction(const Gradients& gradients);
  void add_members(int instance);
  void end_reduction();
  void make_resources();
  void make_links();
  void occupy_message(const Message& message);
  void occupy_reduction(const Reduction& reduction);
  void occupy_streams(int device);
  void make_turns();
  std::vector<std::vector<int>> unit_times() const;
  void make_spans();
  int receive_engine(int device) const;
  int incoming_port(int host) const;

  // Work of streams.
  void start_if_ready(int stream);
  bool may_step(int stream);
  bool is_over(int stream, Action action) const;
  bool has_inputs(const Replica& replica, Action action) const;
  void occupy(int stream, double seconds, double claim_s);
  void vacate(int stream);
  void share(int stream, bool computes);
  double whole_s(int stream) const;
  bool computes(int stream) const { return resources_[first_stream_ + stream].busy == kComputes; }
  void advance(Host& host, int change);
  void retime(const Host& host);
  double rate(const Host& host) const;
  void end_piece(int stream);
  void end_action(Stream& stream, Action action);
  void end_word(Stream& stream);
  const Replica& replica_of(const Stream& stream, Action action) const;

  // Transfers.
  void send(const Replica& replica, Action action, bool begins);
  void complete_buckets(int segment);
  void offer(int lane, int item);
  void start_transfer(int lane, int item);
  void end_transfer(int lane);
  void arrive(int lane, int item);
  void start_waiting(std::span<const int> resources);
  int best_waiting(int resource, int best) const;
  std::int64_t rank(int lane) const;
  int take_first(int lane);
  void count_waiting(int lane, int change);
  void set_busy(int lane, bool busy);
  bool can_start(int lane) const;
  bool has_turn(int lane) const;
  int receiving_device(const Message& message) const {
    return streams_[message.receiver].device;
  }
  double seconds_of(int lane, int item) const;
  bool is_message(int lane) const { return lane < static_cast<int>(messages_.size()); }
  void record(int lane, int item, double end_s);

  const Parts& parts_;
  const Orders& orders_;
  Spans* spans_;
  const int streams_each_;
  const bool steps_together_;
  int steps_ready_ = 0;  // of all devices
  double now_s_ = 0;
  std::int64_t waited_ = 0;
  int waiting_ = 0, ending_ = -1;
  int first_port_ = 0, first_communicator_ = 0, first_stream_ = 0;
  bool any_stands_still_ = false;  // some device does not compute while it communicates
  bool any_streams_ = false;       // some device streams its messages

  std::vector<Device> devices_;
  std::vector<Stream> streams_;
  std::vector<Replica> replicas_;
  std::vector<int> first_replica_;  // of every instance
  std::vector<int> first_segment_;
  std::vector<Host> hosts_;
  std::vector<Resource> resources_;
  std::vector<Message> messages_;
  std::vector<Reduction> reductions_;
  std::vector<Bucket> buckets_;
  std::vector<Lane> lanes_;
  std::vector<bool> works_;  // whether an instance works on a micro-batch, instance after instance
  std::vector<int> inputs_;  // what is still to come, by replica, input and micro-batch
  std::vector<int> links_, place_in_host_;  // of each device: first separate link (-1: none)
  Lists sent_;       // by replica and direction: messages
  Lists completed_;  // by instance and segment: buckets
  Lists occupied_;   // by lane: resources
  Lists users_;      // by resource: lanes
  Lists turns_;      // by device: the lanes of all messages in the planned order
  Events events_{0};
};

}  // namespace penstock
