#include "play.hpp"

#include <algorithm>

namespace penstock {

double Play::run() {
  const int streams = static_cast<int>(streams_.size());
  for (int stream = 0; stream < streams; ++stream) start_if_ready(stream);
  while (!events_.empty()) {
    now_s_ = events_.next_s();
    const int source = events_.take();
    if (source < streams)
      end_piece(source);
    else
      end_transfer(source - streams);
    events_.finish();
  }
  return now_s_;
}

// Work of streams.

const Play::Replica& Play::replica_of(const Stream& stream, Action action) const {
  return replicas_[first_replica_[action.instance()] + stream.replica];
}

/// Start the next piece of a stream if it is idle and the inputs of the piece have arrived.
void Play::start_if_ready(int number) {
  Stream& stream = streams_[number];
  Device& device = devices_[stream.device];
  if (resources_[first_stream_ + number].busy || number == ending_ || device.unsent > 0) return;
  while (stream.next != stream.end && orders_.actions[stream.next].kind() > Kind::step) {
    if (!is_over(number, orders_.actions[stream.next])) return;
    ++stream.next;
  }
  if (stream.next == stream.end) return;
  const Action action = orders_.actions[stream.next];
  const Kind kind = action.kind();
  if (kind == Kind::step ? !may_step(number)
                         : stream.segment == 0 && !has_inputs(replica_of(stream, action), action))
    return;
  if (spans_ && stream.segment == 0)
    spans_->actions[stream.first_span + stream.next].start_s = now_s_;
  if (kind == Kind::step) {
    occupy(number, device.step_s, device.step_s);
    return;
  }
  const ReplicaWork& times = *replica_of(stream, action).work;
  const bool goes_forward = kind == Kind::forward || kind == Kind::recompute;
  occupy(number, action.updates() ? times.segments_s[stream.segment] : times.of(kind),
         times.of(goes_forward ? Kind::forward : Kind::backward));
  if (any_streams_ && stream.segment == 0) send(replica_of(stream, action), action, true);
}

/// Return whether the gradients that a device's step waits for are summed. The last device that is
/// ready for a step that all take together starts those of the others.
bool Play::may_step(int number) {
  Device& device = devices_[streams_[number].device];
  if (device.buckets_left > 0) return false;
  if (!steps_together_) return true;
  const int devices = static_cast<int>(devices_.size());
  if (device.steps_ready == device.steps_done) {
    ++device.steps_ready;
    if (++steps_ready_ == devices * device.steps_ready)
      for (int other = 0; other < static_cast<int>(streams_.size()); ++other)
        if (other != number) start_if_ready(other);
  }
  return steps_ready_ >= devices * device.steps_ready;
}

/// Return whether a wait or a hold is over.
bool Play::is_over(int number, Action action) const {
  if (action.kind() == Kind::wait)
    return devices_[streams_[number].device].steps_done >= action.number();
  const Stream& other = streams_[number + 1];
  return other.end - other.next <= action.number();
}

/// Return whether the inputs of an action have arrived. Backwards in a stream of their own also
/// wait for the forward of their replica.
bool Play::has_inputs(const Replica& replica, Action action) const {
  const Kind kind = action.kind();
  const auto arrived = [&](int row) {
    return inputs_[replica.inputs[row] + action.number()] == 0;
  };
  if (kind <= Kind::backward_input && !arrived(kind != Kind::forward)) return false;
  if (streams_each_ == 1 || kind == Kind::forward || kind == Kind::backward_weight) return true;
  return arrived(2);
}

/// Seconds of work that each computing device of a host does in a second.
double Play::rate(const Host& host) const {
  return std::min(1.0, static_cast<double>(host.slots) / std::max(1, host.computing));
}

/// Advance the virtual time of a host to now, then change how many devices share it.
void Play::advance(Host& host, int change) {
  host.progress += rate(host) * (now_s_ - host.since_s);
  host.since_s = now_s_;
  host.computing += change;
}

/// Move the ends of all work on a host to its present rate.
void Play::retime(const Host& host) {
  const double rate_now = rate(host);
  for (const int stream : host.streams) {
    if (!computes(stream)) continue;
    const double left = std::max(0.0, streams_[stream].finish - host.progress);
    events_.set(stream, now_s_ + left / rate_now);
  }
}

/// Begin a piece of work; what shares the device or the slots of its host slows down.
void Play::occupy(int number, double seconds, double claim_s) {
  Stream& stream = streams_[number];
  Host& host = hosts_[devices_[stream.device].host];
  if (streams_each_ == 2) {
    stream.seconds = seconds;
    stream.claim_s = claim_s;
    share(number, true);
    return;
  }
  resources_[first_stream_ + number].busy = kComputes;
  if (host.slots == 0) {
    events_.set(number, now_s_ + seconds);
    return;
  }
  advance(host, +1);
  stream.finish = host.progress + seconds;
  retime(host);
}

/// End a piece of work; what shares the device or the slots of its host speeds up.
void Play::vacate(int number) {
  if (streams_each_ == 2) {
    share(number, false);
    return;
  }
  Host& host = hosts_[devices_[streams_[number].device].host];
  resources_[first_stream_ + number].busy = 0;
  if (host.slots == 0) return;
  advance(host, -1);
  retime(host);
}

/// Seconds of the whole piece of one of two streams, at its present share of the device.
double Play::whole_s(int number) const {
  const Stream& stream = streams_[number];
  if (stream.claim_s == 0 || !computes(number ^ 1)) return stream.seconds;
  // Forwards first, so that all engines add in the same order.
  const double both_s = streams_[number & ~1].claim_s + streams_[number | 1].claim_s;
  return stream.seconds / stream.claim_s * both_s;
}

/// Begin or end a piece on one of two streams, and retime the piece on the other.
void Play::share(int number, bool begins) {
  Stream &stream = streams_[number], &other = streams_[number ^ 1];
  Host& host = hosts_[devices_[stream.device].host];
  const bool both = computes(number ^ 1);
  if (host.slots > 0) advance(host, both ? 0 : begins ? +1 : -1);
  const double clock = host.slots > 0 ? host.progress : now_s_;
  const double other_s = both ? whole_s(number ^ 1) : 0;
  resources_[first_stream_ + number].busy = begins ? kComputes : 0;
  if (other_s > 0) {
    other.left -= (clock - other.since) / other_s;
    other.since = clock;
    other.finish = clock + other.left * whole_s(number ^ 1);
  }
  if (begins) {
    stream.left = 1;
    stream.since = clock;
    stream.finish = clock + whole_s(number);
  }
  if (host.slots > 0) {
    retime(host);
    return;
  }
  if (begins) events_.set(number, stream.finish);
  if (both) events_.set(number ^ 1, other.finish);
}

/// End a piece of work: send its results, then start what can start.
void Play::end_piece(int number) {
  Stream& stream = streams_[number];
  const Action action = orders_.actions[stream.next];
  vacate(number);
  ending_ = number;
  if (any_stands_still_) {
    const int resource = first_stream_ + number;
    start_waiting({&resource, 1});
  }
  if (action.kind() == Kind::step) {
    Device& device = devices_[stream.device];
    device.buckets_left += device.buckets;
    ++device.steps_done;
    end_word(stream);
  } else {
    end_action(stream, action);
  }
  ending_ = -1;
  for (int k = 0; k < streams_each_; ++k) start_if_ready(stream.device * streams_each_ + k);
}

void Play::end_word(Stream& stream) {
  if (spans_) spans_->actions[stream.first_span + stream.next].end_s = now_s_;
  ++stream.next;
}

/// End an action, or a segment of a last backward: send messages, complete buckets.
void Play::end_action(Stream& stream, Action action) {
  const Replica& replica = replica_of(stream, action);
  const bool goes_forward = action.kind() == Kind::forward;
  const int segment = stream.segment++;
  const int segments = action.updates() ? static_cast<int>(replica.work->segments_s.size()) : 1;
  if (stream.segment == segments) {
    stream.segment = 0;
    end_word(stream);
    send(replica, action, false);
    if (goes_forward && streams_each_ == 2)
      inputs_[replica.inputs[2] + action.number()] = 0;
  }
  if (action.updates()) complete_buckets(replica.first_segment + segment);
}

// Transfers.

/// An action begins: offer the messages that pass beside it. Or it has ended: offer the others. One
/// that passed beside it arrives with the second of two ends, its own and that of the action.
void Play::send(const Replica& replica, Action action, bool begins) {
  if (action.kind() > Kind::backward_input) return;
  for (const int message : sent_[replica.first_sent + (action.kind() == Kind::forward)]) {
    if (!works(messages_[message].to, action.number())) continue;
    if (messages_[message].streams == begins)
      offer(message, action.number());
    else if (!begins)
      arrive(message, action.number());
  }
}

/// Offer the buckets whose last gradients came with a segment.
void Play::complete_buckets(int segment) {
  for (const int number : completed_[segment]) {
    Bucket& bucket = buckets_[number];
    if (--bucket.members_left > 0) continue;
    const Reduction& reduction = reductions_[bucket.reduction];
    const int size = static_cast<int>(reduction.gradients->buckets_s.size());
    bucket.members_left = reduction.working;
    const int item = bucket.rounds_done++ * size + number - reduction.first_bucket;
    offer(static_cast<int>(messages_.size()) + bucket.reduction, item);
  }
}

double Play::seconds_of(int lane, int item) const {
  if (is_message(lane)) return messages_[lane].seconds;
  const std::vector<double>& buckets_s = reductions_[lane - messages_.size()].gradients->buckets_s;
  return buckets_s[item % buckets_s.size()];
}

/// A message or bucket is ready: start it, or let it wait.
///
/// Nothing that waits can start now: it would have started when its resources became free.
void Play::offer(int number, int item) {
  if (seconds_of(number, item) == 0) {
    record(number, item, now_s_);
    arrive(number, item);
    return;
  }
  Lane& lane = lanes_[number];
  if (lane.queue.empty() && can_start(number)) {
    start_transfer(number, item);
    return;
  }
  lane.queue.push_back({item, waited_++});
  count_waiting(number, +1);
}

void Play::start_transfer(int lane, int item) {
  lanes_[lane].current = item;
  set_busy(lane, true);
  const double end_s = now_s_ + seconds_of(lane, item);
  record(lane, item, end_s);
  events_.set(static_cast<int>(streams_.size()) + lane, end_s);
}

/// Free the resources of a lane, start what waited for them, deliver the item, resume work.
void Play::end_transfer(int lane) {
  const int item = lanes_[lane].current;  // The lane may start another one now.
  set_busy(lane, false);
  if (parts_.in_order && is_message(lane)) {
    ++devices_[messages_[lane].sender].turn;
    ++devices_[receiving_device(messages_[lane])].turn;
  }
  start_waiting(occupied_[lane]);
  arrive(lane, item);
  if (!any_stands_still_) return;
  for (const int resource : occupied_[lane])
    if (resource >= first_stream_) start_if_ready(resource - first_stream_);
}

/// Deliver a message, or the sum of a bucket.
void Play::arrive(int lane, int item) {
  if (is_message(lane)) {
    const Message& message = messages_[lane];
    --inputs_[message.input + item];
    start_if_ready(message.receiver);
    return;
  }
  for (const int device : reductions_[lane - messages_.size()].members) {
    --devices_[device].buckets_left;
    start_if_ready(device * streams_each_ + streams_each_ - 1);
  }
}

bool Play::can_start(int lane) const {
  return has_turn(lane) &&
         std::ranges::none_of(occupied_[lane], [&](int r) { return resources_[r].busy & 1; });
}

/// Return whether no other message comes before the next one of a lane at either end.
bool Play::has_turn(int lane) const {
  if (!parts_.in_order || !is_message(lane)) return true;
  const auto next = [&](int device) { return turns_[device][devices_[device].turn]; };
  const Message& message = messages_[lane];
  return next(message.sender) == lane && next(receiving_device(message)) == lane;
}

void Play::set_busy(int lane, bool busy) {
  for (const int number : occupied_[lane]) {
    Resource& resource = resources_[number];
    if (resource.several)
      resource.busy += busy ? kOneOfSeveral : -kOneOfSeveral;
    else
      resource.busy = busy ? kTransfers : 0;
  }
}

/// Count the waiting items of the resources of a lane, and of a sender that stands still meanwhile.
void Play::count_waiting(int lane, int change) {
  waiting_ += change;
  if (is_message(lane)) {
    Device& sender = devices_[messages_[lane].sender];
    if (!sender.overlaps) sender.unsent += change;
  }
  for (const int resource : occupied_[lane]) resources_[resource].waiting += change;
}

/// Start what waited for resources that are free now: messages first, then by age.
void Play::start_waiting(std::span<const int> resources) {
  while (waiting_ > 0) {
    int best = -1;
    for (const int resource : resources) best = best_waiting(resource, best);
    if (best < 0) return;
    start_transfer(best, take_first(best));
  }
}

/// The better of `best` and the lanes that wait for a resource and can start now.
int Play::best_waiting(int resource, int best) const {
  if (resources_[resource].waiting == 0) return best;
  for (const int lane : users_[resource])
    if (!lanes_[lane].queue.empty() && (best < 0 || rank(lane) < rank(best)) && can_start(lane))
      best = lane;
  return best;
}

/// The rank of the first waiting item of a lane: messages before reductions, then by age.
std::int64_t Play::rank(int number) const {
  const Lane& lane = lanes_[number];
  const std::int64_t age = lane.queue[lane.head].age;
  return is_message(number) ? age : age + (std::int64_t{1} << 60);
}

int Play::take_first(int number) {
  Lane& lane = lanes_[number];
  count_waiting(number, -1);
  const int item = lane.queue[lane.head++].item;
  if (lane.head == lane.queue.size()) {
    lane.queue.clear();
    lane.head = 0;
  }
  return item;
}

void Play::record(int lane, int item, double end_s) {
  if (spans_) spans_->items[lanes_[lane].first_span + item] = {now_s_, end_s};
}

}  // namespace penstock
