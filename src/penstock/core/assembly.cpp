// Numbers the replicas, devices, messages and reductions of a plan, as
// `penstock.simulate.workload.Workload` does.
#include <algorithm>
#include <stdexcept>

#include "play.hpp"

namespace penstock {

void Orders::check() const {
  const auto refuse = [](bool wrong, const char* why) {
    if (wrong) throw std::invalid_argument(why);
  };
  refuse(streams_each != 1 && streams_each != 2, "a device has one or two streams");
  refuse(start.empty() || start.front() != 0 || !std::ranges::is_sorted(start) ||
             start.back() != static_cast<std::int64_t>(actions.size()) ||
             (start.size() - 1) % streams_each != 0,
         "streams must cover all actions");
  refuse(iterations < 1 || micro_batches % iterations != 0,
         "iterations have equally many micro-batches");
  refuse(groups.size() != rounds.size(), "each instance has a group and its rounds");
  for (const int group : groups)
    refuse(group < 0 || group >= group_count(), "an instance is in no device group");
  for (const Action action : actions) {
    const Kind kind = action.kind();
    refuse(kind > Kind::step && streams_each == 1, "only two streams wait for one another");
    refuse(kind < Kind::step && (action.instance() >= static_cast<int>(groups.size()) ||
                                 action.number() < 0 || action.number() >= micro_batches),
           "an action has no instance or micro-batch");
  }
}

Play::Play(const Parts& parts, const Orders& orders, Spans* spans, bool steps_together)
    : parts_(parts), orders_(orders), spans_(spans), streams_each_(orders.streams_each),
      steps_together_(steps_together) {
  if (parts_.stages.size() != orders_.groups.size())
    throw std::invalid_argument("the orders are those of another number of stages");
  make_replicas(make_devices());
  make_messages();
  make_reductions();
  make_resources();
  if (parts_.in_order) make_turns();
  lanes_.resize(messages_.size() + reductions_.size());
  events_ = Events(static_cast<int>(streams_.size() + lanes_.size()));
  if (spans_) make_spans();
}

/// The devices of all groups with their streams; returns the first one of every group.
std::vector<int> Play::make_devices() {
  const int groups = orders_.group_count();
  std::vector<int> first_device(groups + 1);
  for (std::size_t i = 0; i < parts_.stages.size(); ++i)
    first_device[orders_.groups[i] + 1] = static_cast<int>(parts_.stages[i]->replicas.size());
  for (int g = 0; g < groups; ++g) first_device[g + 1] += first_device[g];
  devices_.resize(first_device[groups]);

  std::size_t spans = 0;
  for (int g = 0; g < groups; ++g) {
    for (int device = first_device[g]; device < first_device[g + 1]; ++device) {
      for (int order = g * streams_each_; order < (g + 1) * streams_each_; ++order) {
        const int next = static_cast<int>(orders_.start[order]);
        const int end = static_cast<int>(orders_.start[order + 1]);
        streams_.push_back({device, device - first_device[g], next, end, spans - next});
        spans += end - next;
      }
    }
  }
  return first_device;
}

void Play::make_replicas(const std::vector<int>& first_device) {
  for (const HostRules& rules : parts_.hosts) hosts_.push_back({.slots = rules.full_speed_devices});
  const int inputs_each = 1 + streams_each_;
  int segments = 0;
  for (std::size_t i = 0; i < parts_.stages.size(); ++i) {
    const StageWork& stage = *parts_.stages[i];
    first_replica_.push_back(static_cast<int>(replicas_.size()));
    first_segment_.push_back(segments);
    int number = first_device[orders_.groups[i]];
    for (const ReplicaWork& work : stage.replicas) {
      Device& device = devices_[number];
      device.host = work.host;
      device.overlaps = work.overlaps;
      device.step_s += work.of(Kind::step);
      any_stands_still_ |= !work.overlaps;
      const std::size_t row = inputs_each * replicas_.size(), each = orders_.micro_batches;
      replicas_.push_back({&work, number++, segments, 2 * static_cast<int>(replicas_.size()),
                           {row * each, (row + 1) * each, (row + 2) * each}});
    }
    segments += static_cast<int>(stage.segment_layers.size());
  }
  first_segment_.push_back(segments);
  for (int s = 0; s < static_cast<int>(streams_.size()); ++s)
    hosts_[devices_[streams_[s].device].host].streams.push_back(s);

  inputs_.assign(inputs_each * replicas_.size() * orders_.micro_batches, 0);
  if (streams_each_ == 2)  // Backwards wait for the forward of their replica.
    for (const Replica& replica : replicas_)
      std::fill_n(&inputs_[replica.inputs[2]], orders_.micro_batches, 1);
}

void Play::make_messages() {
  std::vector<Message> made;
  std::vector<std::pair<int, int>> senders;
  works_.resize(parts_.stages.size() * orders_.micro_batches);
  for (const Action action : orders_.actions)
    if (action.kind() < Kind::step)
      works_[static_cast<std::size_t>(action.instance()) * orders_.micro_batches +
             action.number()] = true;
  const auto add = [&](double seconds, const Replica& from, const Replica& to, bool forward,
                       bool uses_port, int sender, int consumer) {
    const int receiver = to.device * streams_each_ + (forward ? 0 : streams_each_ - 1);
    senders.emplace_back(from.first_sent + forward, made.size());
    const bool streams = from.work->streams_messages && seconds > 0;
    any_streams_ |= streams;
    made.push_back({seconds, from.device, receiver, sender, consumer, to.inputs[!forward],
                    forward, uses_port, streams});
  };
  for (const auto& [producer, consumer, boundary] : parts_.connections) {
    for (const Pair& pair : boundary->pairs) {
      const Replica& up = replicas_[first_replica_[producer] + pair.sender];
      const Replica& down = replicas_[first_replica_[consumer] + pair.receiver];
      add(pair.forward_s, up, down, true, pair.port_down, producer, consumer);
      if (pair.returns)
        add(pair.backward_s, down, up, false, pair.port_up, consumer, producer);
    }
  }
  // Sorted by sender, then backwards before forwards, then receiver.
  const Lists sorted(2 * static_cast<int>(replicas_.size()), senders);
  for (int list = 0; list < sorted.size(); ++list) {
    for (const int k : sorted[list]) {
      sent_.add(static_cast<int>(messages_.size()));
      messages_.push_back(made[k]);
      // One that streams waits for two ends: its own, and that of the action that makes it.
      for (int m = 0; m < orders_.micro_batches; ++m)
        if (works(made[k].from, m)) inputs_[made[k].input + m] += 1 + made[k].streams;
    }
    sent_.end_list();
  }
}

/// Start the reduction of a stage or of a tie.
void Play::start_reduction(const Gradients& gradients) {
  reductions_.push_back({&gradients, static_cast<int>(buckets_.size())});
}

/// The reductions of stages and of ties, sorted by their instances.
void Play::make_reductions() {
  std::vector<std::pair<int, int>> completed;
  auto tie = parts_.ties.begin();
  for (int i = 0; i < static_cast<int>(parts_.stages.size()); ++i) {
    const StageWork& stage = *parts_.stages[i];
    if (!stage.gradients.shares.empty()) {
      start_reduction(stage.gradients);
      add_members(i);
      int bucket = static_cast<int>(buckets_.size());
      for (const GradientShare& share : stage.gradients.shares)
        for (int n = 0; n < share.buckets; ++n)
          completed.emplace_back(first_segment_[i] + share.segment, bucket++);
      end_reduction();
    }
    for (; tie != parts_.ties.end() && (*tie)->instances[0] == i; ++tie) {
      start_reduction((*tie)->gradients);
      for (const int instance : (*tie)->instances) {
        add_members(instance);
        for (std::size_t k = 0; k < (*tie)->gradients.buckets_s.size(); ++k)
          completed.emplace_back(first_segment_[instance + 1] - 1,
                                 static_cast<int>(buckets_.size() + k));
      }
      end_reduction();
    }
  }
  completed_ = Lists(first_segment_.back(), completed);
}

/// Add the replicas of an instance. One without work gives no gradients but waits for the sum.
void Play::add_members(int instance) {
  Reduction& reduction = reductions_.back();
  const int replicas = static_cast<int>(parts_.stages[instance]->replicas.size());
  for (int r = first_replica_[instance]; r < first_replica_[instance] + replicas; ++r) {
    Device& device = devices_[replicas_[r].device];
    reduction.members.push_back(replicas_[r].device);
    device.buckets_left = device.buckets += static_cast<int>(reduction.gradients->buckets_s.size());
  }
  if (orders_.rounds[instance]) reduction.working += replicas;
  reduction.rounds = std::max(reduction.rounds, orders_.rounds[instance]);
}

void Play::end_reduction() {
  const Reduction& reduction = reductions_.back();
  const Bucket bucket{static_cast<int>(reductions_.size()) - 1, reduction.working};
  buckets_.insert(buckets_.end(), reduction.gradients->buckets_s.size(), bucket);
}

int Play::receive_engine(int device) const {
  const bool half_duplex = parts_.hosts[devices_[device].host].half_duplex;
  return half_duplex ? device : static_cast<int>(devices_.size()) + device;
}

int Play::incoming_port(int host) const {
  const int incoming = parts_.hosts[host].half_duplex ? 0 : static_cast<int>(hosts_.size());
  return first_port_ + host + incoming;
}

/// Number the send engines, receive engines, outgoing ports, incoming ports, communicators, links
/// and streams; say which of them each lane occupies.
void Play::make_resources() {
  const int devices = static_cast<int>(devices_.size());
  first_port_ = 2 * devices;
  first_communicator_ = first_port_ + 2 * static_cast<int>(hosts_.size());
  first_stream_ = first_communicator_ + (parts_.in_order ? devices : 0);
  make_links();
  resources_.resize(first_stream_ + streams_.size());
  for (std::size_t s = 0; s < streams_.size(); ++s)
    resources_[first_stream_ + s].several = links_[streams_[s].device] >= 0;
  for (const Message& message : messages_) {
    if (message.seconds > 0) occupy_message(message);
    occupied_.end_list();
  }
  for (const Reduction& reduction : reductions_) {
    occupy_reduction(reduction);
    occupied_.end_list();
  }
  users_ = occupied_.inverse(static_cast<int>(resources_.size()));
}

/// On a host with n devices and separate links, link n * i + j leads from the i-th to the j-th.
void Play::make_links() {
  links_.assign(devices_.size(), -1);
  place_in_host_.resize(devices_.size());
  for (std::size_t h = 0; h < hosts_.size(); ++h) {
    if (!parts_.hosts[h].separate_links) continue;
    const int held = static_cast<int>(hosts_[h].streams.size()) / streams_each_;
    for (int place = 0; place < held; ++place) {
      const int device = streams_[hosts_[h].streams[place * streams_each_]].device;
      place_in_host_[device] = place;
      links_[device] = first_stream_;
      first_stream_ += held;
    }
  }
}

void Play::occupy_message(const Message& message) {
  const int source = message.sender, target = receiving_device(message);
  const int here = devices_[source].host, there = devices_[target].host;
  if (links_[source] >= 0 && here == there) {
    const int link = links_[source] + place_in_host_[target];
    const int back = links_[target] + place_in_host_[source];
    occupied_.add(parts_.hosts[here].half_duplex ? std::min(link, back) : link);
  } else {
    occupied_.add(source);
    occupied_.add(receive_engine(target));
    if (message.uses_port) {
      occupied_.add(first_port_ + here);
      occupied_.add(incoming_port(there));
    }
  }
  if (parts_.in_order) {
    occupied_.add(first_communicator_ + source);
    occupied_.add(first_communicator_ + target);
  }
  occupy_streams(source);
  occupy_streams(target);
}

void Play::occupy_reduction(const Reduction& reduction) {
  for (const int host : reduction.gradients->ports.outgoing) occupied_.add(first_port_ + host);
  for (const int host : reduction.gradients->ports.incoming) occupied_.add(incoming_port(host));
  for (const int device : reduction.members) {
    occupied_.add(device);
    if (receive_engine(device) != device) occupied_.add(receive_engine(device));
    occupy_streams(device);
  }
}

/// The streams of a device that does not compute while it communicates.
void Play::occupy_streams(int device) {
  if (devices_[device].overlaps) return;
  for (int k = 0; k < streams_each_; ++k)
    occupied_.add(first_stream_ + device * streams_each_ + k);
}

void Play::make_spans() {
  spans_->actions.resize(streams_.empty() ? 0 : streams_.back().first_span + streams_.back().end);
  std::size_t items = 0;
  for (std::size_t k = 0; k < lanes_.size(); ++k) {
    lanes_[k].first_span = items;
    if (k < messages_.size()) {
      items += orders_.micro_batches;
    } else {
      const Reduction& reduction = reductions_[k - messages_.size()];
      items += reduction.gradients->buckets_s.size() * reduction.rounds;
    }
  }
  spans_->items.resize(items);
}

}  // namespace penstock
