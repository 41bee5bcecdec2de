#include "quick_play.hpp"

#include <algorithm>
#include <cmath>

namespace penstock {
namespace {

constexpr std::size_t kMostCosts = 200'000;  // costs of stages that are kept
constexpr int kOverhead = 60, kCosting = 60;  // a point, and a stage, in simulated actions
constexpr double kRounding = 1 + 1e-9;

}  // namespace

QuickPlay::QuickPlay(std::vector<const SearchCosts*> costs, PointRules given)
    : rules(std::move(given)), costs_(std::move(costs)) {
  for (const SearchCosts* each : costs_)
    stage_costs_.emplace_back(each ? *each : *costs_[0], rules.split);
}

double QuickPlay::seconds(const Point& point, double limit_s) {
  point_ = &point;
  size_ = rules.sizes[point.size];
  all_ = rules.batch / size_;
  spent += kOverhead + 10 * point.stages();
  if (!set_costs()) return kInfinity;
  connect();
  if (!set_depths()) return kInfinity;
  const double least_s = bound_s();
  return least_s > limit_s ? least_s : std::max(least_s, play(limit_s));
}

/// Find the costs of all stages; false where a group has more devices than there are rows.
bool QuickPlay::set_costs() {
  const int groups = point_->groups();
  groups_.assign(groups, {});
  rows_.resize(point_->order.size());
  group_.resize(point_->stages());
  cost_.resize(point_->stages());
  for (int g = 0; g < groups; ++g) {
    if (width_of(g) > size_) return false;
    stage_costs_[0].split_rows(devices_of(g), rows_of(g), size_);
  }
  for (int s = 0; s < point_->stages(); ++s) {
    group_[s] = rules.group_of(s, groups);
    groups_[group_[s]].stages.push_back(s);
    cost_[s] = cost_of(group_[s], {point_->cuts[s], point_->cuts[s + 1]});
  }
  if (rules.style == Style::mirrored) mirror_costs();
  return true;
}

const StageCost& QuickPlay::cost_of(int group, Run run) {
  const int first = point_->starts[group], width = width_of(group);
  const int kind = 2 * point_->sharding[group] + (point_->recompute[group] == kByBlock);
  std::uint64_t key = 1469598103934665603u;
  const auto mix = [&](int part) {
    key = (key ^ static_cast<std::uint64_t>(part + 1)) * 0x9E3779B97F4A7C15u;
    key ^= key >> 29;
  };
  for (int k = first; k < first + width; ++k) mix(point_->order[k]);
  for (const int part : {run.lo, run.hi, size_, kind}) mix(part);
  if (const auto at = known_.find(key); at != known_.end()) return at->second;
  if (known_.size() > kMostCosts) known_.clear();
  spent += kCosting + 4 * width;
  return known_
      .emplace(key, stage_costs_[kind].of(devices_of(group), rows_of(group), run, size_, all_))
      .first->second;
}

/// Let each group have the mean work and the memory of its two stages.
void QuickPlay::mirror_costs() {
  const std::vector<StageCost> own = cost_;
  const int groups = point_->groups();
  for (int g = 0; g < groups; ++g) {
    StageCost& cost = cost_[g];
    const StageCost& other = own[groups - 1 - g];
    cost.forward_s = (cost.forward_s + other.forward_s) / 2;
    cost.backward_s = (cost.backward_s + other.backward_s) / 2;
    cost.weight_s = (cost.weight_s + other.weight_s) / 2;
    cost.after_s += other.after_s;
    cost.held += other.held;
    cost.saved = std::max(cost.saved, other.saved);
    cost.inputs = std::max(cost.inputs, other.inputs);
    const double room = cost.memory - cost.held - std::max(cost.workspace, other.workspace);
    const auto most = [&](double bytes) {
      return bytes > 0 ? static_cast<int>(std::clamp<double>(room / bytes, 0, all_)) : all_;
    };
    cost.kept = most(cost.saved);
    cost.leaner = room < cost.saved ? 0 : most(cost.inputs);
  }
}

/// Seconds that a group computes for a micro-batch of one of its stages.
double QuickPlay::work_s(int stage) const {
  const StageCost& cost = cost_[stage];
  const bool again = recomputes(group_[stage]) && depth_[stage] > 1;
  return cost.forward_s * (1 + again) + cost.backward_s;
}

/// Find the messages between stages.
void QuickPlay::connect() {
  const int stages = point_->stages();
  pairs_.clear();
  for (int s = 0; s + 1 < stages; ++s) pairs_.push_back({s, s + 1, true});
  const auto home_of = [&](int s) { return group_[s]; };
  const auto carry = [&](int s, int t, const Tensor& tensor) {
    auto pair = pairs_.begin() + s;
    if (t != s + 1) {
      pair = std::find_if(pairs_.begin() + stages - 1, pairs_.end(),
                          [&](const Pair& one) { return one.from == s && one.to == t; });
      if (pair == pairs_.end()) pair = pairs_.insert(pair, {s, t, false});
    }
    const auto add = [&](int way, Affine bytes) {
      if (bytes.fixed <= 0 && bytes.each <= 0) return;
      ++pair->tensors[way];
      pair->bytes[way] = pair->bytes[way] + bytes;
      pair->returns = pair->returns || way == 1;
    };
    add(0, tensor.bytes);
    add(1, tensor.gradient_bytes);
  };
  for_sent_tensors(costs(), point_->cuts, home_of, stage_of_layer_, carry);
  messages_.clear();
  out_.assign(stages, {});
  in_.assign(stages, {});
  for (int k = 0; k < static_cast<int>(pairs_.size()); ++k) {
    for (const int way : {0, 1}) add_messages(pairs_[k], way);
    out_[pairs_[k].from].push_back(k);
    in_[pairs_[k].to].push_back(k);
  }
}

/// Add the messages of two stages, forward (0) or back (1): the rows that two devices share.
void QuickPlay::add_messages(Pair& pair, int way) {
  const int from = way ? pair.to : pair.from, to = way ? pair.from : pair.to;
  const int first = static_cast<int>(messages_.size());
  pair.messages[way] = {first, first};
  if (group_[from] == group_[to] || pair.tensors[way] == 0) return;
  const Links& links = costs().links;
  const int places = static_cast<int>(point_->order.size());
  const int hosts = static_cast<int>(costs().hosts.size());
  const Places senders = places_of(group_[from]), receivers = places_of(group_[to]);
  for_shared_rows(rows_, senders, receivers, [&](int i, int j, int shared) {
    const std::size_t link = links.of(point_->order[i], point_->order[j]);
    const double seconds = links.message_s(link, pair.tensors[way], pair.bytes[way].at(shared));
    const int here = host_at(i), there = host_at(j);
    const HostRules& host = costs().hosts[there];
    const int none = nothing();
    Uses uses = {i, host.half_duplex ? j : places + j, none, none};
    if (links.uses_port[link]) {
      uses[2] = 2 * places + here;
      uses[3] = 2 * places + (host.half_duplex ? 0 : hosts) + there;
    } else if (here == there && host.separate_links) {
      uses.fill(none);
    }
    messages_.push_back({to, way == 0, seconds, uses});
    pair.seconds[way] = std::max(pair.seconds[way], seconds);
  });
  pair.messages[way].second = static_cast<int>(messages_.size());
}

/// Micro-batches in flight that a point requests, however much memory there is.
int QuickPlay::wish(int stage) const {
  if (!point_->limits.empty()) return std::min(all_, point_->limits[stage]);
  const int least = rules.has_one_stage_each() ? 1 : point_->groups();
  const double most = kDepths[point_->depth] * std::max(least, point_->stages() - stage);
  return static_cast<int>(std::ceil(std::min<double>(all_, most)));
}

/// Find the micro-batches in flight of each stage; false where one does not fit.
bool QuickPlay::set_depths() {
  const int stages = point_->stages();
  depth_.resize(stages);
  if (rules.has_one_stage_each()) {
    int before = all_;
    for (int s = 0; s < stages; ++s) {
      const int room = recomputes(s) ? cost_[s].leaner : cost_[s].kept;
      if (room < 1) return false;
      depth_[s] = before = std::min({before, room, wish(s)});
    }
    return true;
  }
  for (int g = 0; g < point_->groups(); ++g) {
    double held = 0, workspace = 0, each = 0, memory = kInfinity;
    for (const int s : groups_[g].stages) {
      const StageCost& cost = cost_[s];
      held += cost.held;
      workspace = std::max(workspace, cost.workspace + (recomputes(g) ? cost.saved : 0));
      each += bytes_kept(s);
      memory = std::min(memory, cost.memory);
    }
    const double room = groups_[g].room = (memory - held - workspace) * kRounding;
    if (room < each) return false;
    for (const int s : groups_[g].stages) {
      const double bytes = bytes_kept(s), wanted = wish(s);
      depth_[s] = static_cast<int>(bytes * wanted > room ? room / bytes : wanted);
    }
  }
  return true;
}

/// Seconds that no order beats: of the fullest group, engine or port, or host with few cores.
double QuickPlay::bound_s() {
  const std::vector<HostRules>& hosts = costs().hosts;
  std::vector<double> carried_s(nothing() + 1);
  period_s_ = 0;
  for (const Message& message : messages_)
    for (const int one : message.uses)
      if (one != nothing()) period_s_ = std::max(period_s_, carried_s[one] += message.seconds);
  double reached_s = 0, most_s = all_ * period_s_;
  std::vector<double> computed_s(hosts.size());
  for (int g = 0; g < point_->groups(); ++g) {
    double each_s = 0;
    for (const int s : groups_[g].stages) each_s += work_s(s);
    period_s_ = std::max(period_s_, each_s);
    each_s *= all_;
    most_s = std::max(most_s, reached_s + each_s + std::max(reached_s, cost_[g].after_s));
    for (int k = point_->starts[g]; k < point_->starts[g + 1]; ++k) {
      // A group that fills its host takes longer already.
      const int slots = hosts[host_at(k)].full_speed_devices;
      if (slots > 0) computed_s[host_at(k)] += each_s / std::max(slots, width_of(g));
    }
    reached_s += cost_[g].forward_s + (g + 1 < point_->groups() ? pairs_[g].seconds[0] : 0);
  }
  return std::max(most_s, std::ranges::max(computed_s));
}

// The play.

/// Call for a group, or for a message behind all groups, at a time.
void QuickPlay::wake(int source, double time_s) {
  // The heap has its largest element first.
  events_.push_back({-time_s, -source});
  std::push_heap(events_.begin(), events_.end());
}

double QuickPlay::play(double limit_s) {
  const int stages = point_->stages(), groups = point_->groups();
  // Long enough for the pipeline to fill, and for some periods after that.
  filling_ = rules.has_one_stage_each() ? depth_[0] : std::min(depth_[0], 3 * stages);
  const int wanted = is_strict() ? filling_ + filling_ / 2 + std::max(16, stages)
                                 : 2 * filling_ + std::max(32, 2 * stages);
  count_ = simulates_all || all_ <= wanted + wanted / 3 ? all_ : wanted;
  progress_.assign(stages, {});
  for (int way : {0, 1}) {
    at_s_[way].assign(static_cast<std::size_t>(stages) * count_, 0);
    missing_[way].resize(at_s_[way].size());
    for (int s = 0; s < stages; ++s) {
      int inputs = way == 1 && s + 1 == stages;  // its own forward
      for (const int k : way ? out_[s] : in_[s]) {
        const auto [first, end] = pairs_[k].messages[way];
        if (way == 0 || pairs_[k].returns) inputs += std::max(1, end - first);
      }
      std::fill_n(missing_[way].begin() + static_cast<std::ptrdiff_t>(s) * count_, count_, inputs);
    }
  }
  busy_.assign(nothing() + 1, 0);
  waiting_.clear();
  for (Message& message : messages_) message.ready_s.resize(count_);
  drained_s_.clear();
  events_.clear();
  // No group can be done before its work that is left, nor others of the micro-batches sooner than
  // the fullest resource.
  for (Group& group : groups_)
    for (const int s : group.stages) group.left_s += count_ * work_s(s);
  gave_up_ = false;
  give_up_s_ = limit_s - (all_ - count_) * period_s_;
  wake(0, 0);
  std::int64_t done = 0;
  while (!events_.empty() && !gave_up_) {
    std::pop_heap(events_.begin(), events_.end());
    const double now_s = -events_.back().first;
    const int source = -events_.back().second;
    events_.pop_back();
    if (source >= groups) {
      end_message(source - groups, now_s);
      ++spent;
      continue;
    }
    if (groups_[source].running >= 0) {
      if (now_s < groups_[source].done_s) continue;
      end_action(source, now_s);
      ++done;
    }
    choose(source, now_s);
  }
  spent += done;
  if (gave_up_) return 2 * limit_s;
  const bool stuck = done < static_cast<std::int64_t>(stages) * count_ * (rules.split ? 3 : 2);
  return stuck ? kInfinity : end_s();
}

/// Time when all is summed and stepped, with the period of the micro-batches that were left out.
double QuickPlay::end_s() const {
  double end_s = 0;
  for (const Group& group : groups_) {
    double summed_s = 0;
    for (auto s = group.stages.rbegin(); s != group.stages.rend(); ++s) {
      const double ready_s = progress_[*s].ended_s + cost_[*s].after_s;
      summed_s = std::max(summed_s + cost_[*s].reduced_s, ready_s);
    }
    end_s = std::max(end_s, summed_s);
  }
  if (count_ == all_) return end_s;
  const int last = std::max(2, count_ - filling_ - 1), first = last / 2;
  const double period_s = (drained_s_[last] - drained_s_[first]) / (last - first);
  return end_s + (all_ - count_) * std::max(period_s, period_s_);
}

/// Return whether the input of a stage's next forward or backward is there; else lower `soonest_s`.
bool QuickPlay::is_ready(bool forward, int stage, double now_s, double& soonest_s) const {
  const Progress& done = progress_[stage];
  const std::size_t k = static_cast<std::size_t>(stage) * count_ + (forward ? done.forwards : done.backwards);
  if (missing_[!forward][k] > 0) return false;
  const double at_s = at_s_[!forward][k];
  if (at_s > now_s) soonest_s = std::min(soonest_s, at_s);
  return at_s <= now_s;
}

/// Return the next action of a group, by the rules above.
std::pair<QuickPlay::Action, int> QuickPlay::next_of(int g, double now_s, double& soonest_s) const {
  const Group& group = groups_[g];
  if (is_strict()) {
    const Progress& done = progress_[g];
    const bool forward = done.forwards < count_ && done.forwards - done.backwards < depth_[g];
    if (done.backwards == count_ || !is_ready(forward, g, now_s, soonest_s)) return {kNothing, g};
    return {forward ? kForward : kBackward, g};
  }
  int oldest = count_, stage = -1;
  for (auto at = group.stages.rbegin(); at != group.stages.rend(); ++at) {
    const Progress& done = progress_[*at];
    if (done.backwards < done.forwards && done.backwards < oldest &&
        is_ready(false, *at, now_s, soonest_s))
      oldest = done.backwards, stage = *at;
  }
  if (stage >= 0) return {kBackward, stage};
  double reserved = 0;  // later stages must still be able to hold a micro-batch
  for (auto at = group.stages.rbegin(); at != group.stages.rend(); ++at) {
    const Progress& done = progress_[*at];
    const double bytes = bytes_kept(*at);
    const int freed = rules.split ? done.weights : done.backwards;
    const bool fits = rules.has_one_stage_each() || group.used + bytes + reserved <= group.room;
    if (done.forwards < count_ && done.forwards - freed < depth_[*at] && fits &&
        is_ready(true, *at, now_s, soonest_s))
      return {kForward, *at};
    reserved += bytes;
  }
  if (rules.split)
    for (const int s : group.stages)
      if (progress_[s].weights < progress_[s].backwards) return {kWeight, s};
  return {kNothing, -1};
}

/// Start the next action of an idle group.
void QuickPlay::choose(int g, double now_s) {
  Group& group = groups_[g];
  if (group.running >= 0) return;
  double soonest_s = kInfinity;
  const auto [action, stage] = next_of(g, now_s, soonest_s);
  if (action == kNothing) {
    if (soonest_s < kInfinity) wake(g, soonest_s);
    return;
  }
  if (now_s + group.left_s > give_up_s_) {
    gave_up_ = true;
    return;
  }
  const StageCost& cost = cost_[stage];
  double seconds = cost.weight_s;
  if (action == kForward) {
    seconds = cost.forward_s;
    ++progress_[stage].forwards;
    group.used += bytes_kept(stage);
  } else if (action == kBackward) {
    seconds = work_s(stage) - cost.forward_s - (rules.split ? cost.weight_s : 0);
  }
  group.left_s -= seconds;
  group.running = stage;
  group.action = action;
  group.done_s = now_s + seconds;
  wake(g, group.done_s);
}

void QuickPlay::end_action(int g, double now_s) {
  Group& group = groups_[g];
  const int s = group.running;
  Progress& done = progress_[s];
  group.running = -1;
  if (group.action == kForward) {
    const int m = done.forwards - 1;
    if (s + 1 == point_->stages()) arrive(s, m, false, now_s);
    for (const int k : out_[s]) send(pairs_[k], m, 0, now_s);
    return;
  }
  done.ended_s = now_s;
  if (group.action == kWeight || !rules.split) group.used -= bytes_kept(s);
  if (group.action == kWeight) {
    ++done.weights;
    return;
  }
  const int m = done.backwards++;
  // The gradients of weights are summed later if they are computed later.
  const double blocked_s = m + 1 == count_ && !rules.split ? this->blocked_s(s, now_s) : 0;
  for (const int k : in_[s])
    if (pairs_[k].returns) send(pairs_[k], m, 1, now_s, blocked_s);
  if (s == 0) drained_s_.push_back(now_s);
}

/// Seconds for which a bucket that began during the last backward blocks the sending of gradients.
double QuickPlay::blocked_s(int stage, double now_s) const {
  const StageCost& cost = cost_[stage];
  double start_s = now_s - cost.early_s;
  for (const int k : in_[stage]) {
    const auto [first, end] = pairs_[k].messages[1];
    for (int number = first; number < end; ++number) {
      const Message& message = messages_[number];
      if (message.offered > message.sent) return 0;  // messages go before buckets
      start_s = std::max(start_s, message.ended_s);
    }
  }
  return start_s < now_s ? start_s + cost.early_s - now_s + cost.blocked_s : 0;
}

/// Offer what one stage sends another. Its engines, if it uses some, are blocked for a while.
void QuickPlay::send(const Pair& pair, int micro_batch, int way, double now_s, double blocked_s) {
  const auto [first, end] = pair.messages[way];
  if (first == end) return arrive(way ? pair.from : pair.to, micro_batch, way == 0, now_s);
  for (int number = first; number < end; ++number) {
    Message& message = messages_[number];
    const double from_s = now_s + (message.uses[0] == nothing() ? 0 : blocked_s);
    message.ready_s[message.offered++] = from_s;
    if (message.offered - message.sent > 1) continue;
    if (can_start(message.uses))
      start_message(number, from_s);
    else
      wait(number);
  }
}

/// Keep a message waiting, behind those that were ready before.
void QuickPlay::wait(int number) {
  const Message& message = messages_[number];
  const Waiting one{message.ready_s[message.sent], number, message.uses};
  waiting_.insert(std::ranges::upper_bound(waiting_, one.ready_s, {}, &Waiting::ready_s), one);
}

bool QuickPlay::can_start(const Uses& uses) const {
  return std::ranges::none_of(uses, [&](int one) { return busy_[one]; });
}

void QuickPlay::start_message(int number, double now_s) {
  for (const int one : messages_[number].uses) busy_[one] = 1;
  busy_[nothing()] = 0;
  wake(point_->groups() + number, now_s + messages_[number].seconds);
}

/// End a message; of those that wait, the ones that were ready first start now.
void QuickPlay::end_message(int number, double now_s) {
  Message& message = messages_[number];
  for (const int one : message.uses) busy_[one] = 0;
  const int m = message.sent++;
  message.ended_s = now_s;
  if (message.offered > message.sent) wait(number);
  std::erase_if(waiting_, [&](const Waiting& one) {
    const bool starts = can_start(one.uses);
    if (starts) start_message(one.number, now_s);
    return starts;
  });
  arrive(message.stage, m, message.forward, now_s);
}

void QuickPlay::arrive(int stage, int micro_batch, bool forward, double at_s) {
  const std::size_t k = static_cast<std::size_t>(stage) * count_ + micro_batch;
  at_s_[!forward][k] = std::max(at_s_[!forward][k], at_s);
  if (--missing_[!forward][k] == 0 && groups_[group_[stage]].running < 0)
    wake(group_[stage], at_s_[!forward][k]);
}

// Points from points.

void QuickPlay::even_cuts(Point& point) const {
  const RunCosts& runs = costs().runs;
  const int layers = rules.layers(), groups = point.groups(), stages = groups * rules.rounds;
  const int size = rules.sizes[point.size];
  std::vector<double> share(stages), sums(layers + 1);
  double total = 0;
  for (int s = 0; s < stages; ++s) {
    const int g = rules.group_of(s, groups);
    for (int k = point.starts[g]; k < point.starts[g + 1]; ++k)
      total += costs().devices[point.order[k]].speed;
    share[s] = total;
  }
  for (int k = 0; k <= layers; ++k) sums[k] = runs.forward[k].at(size) + runs.backward[k].at(size);
  point.cuts.assign(1, 0);
  for (int s = 0; s + 1 < stages; ++s) {
    const double wanted = sums[layers] * share[s] / total;
    int cut = static_cast<int>(std::ranges::lower_bound(sums, wanted) - sums.begin());
    if (cut > 0 && wanted - sums[cut - 1] < sums[std::min(cut, layers)] - wanted) --cut;
    point.cuts.push_back(std::clamp(cut, point.cuts.back() + 1, layers - (stages - 1 - s)));
  }
  point.cuts.push_back(layers);
  point.limits.clear();
}

/// Let those groups recompute that cannot keep a micro-batch for each stage from here on.
void QuickPlay::save_where_short(Point& point, int recompute) {
  seconds(point, 0);
  const int groups = point.groups();
  for (int g = 0; g < groups; ++g) {
    bool short_of = false;
    if (rules.has_one_stage_each()) {
      short_of = cost_[g].kept < std::min(groups - g, all_);
    } else {
      double left = kInfinity, held = 0, saved = 0, workspace = 0;
      for (const int s : groups_[g].stages) {
        held += cost_[s].held;
        saved += cost_[s].saved;
        workspace = std::max(workspace, cost_[s].workspace);
        left = std::min(left, cost_[s].memory);
      }
      short_of = left - held - workspace < saved * std::min(groups, all_);
    }
    if (short_of) point.recompute[g] = recompute;
  }
}

/// Return whether more memory would let a group have more of the last point's micro-batches in
/// flight.
bool QuickPlay::is_short(int group) const {
  if (!rules.has_one_stage_each()) {
    double bytes = 0;
    for (const int s : groups_[group].stages) bytes += bytes_kept(s) * depth_[s];
    return groups_[group].room < bytes;
  }
  const int room = recomputes(group) ? cost_[group].leaner : cost_[group].kept;
  return room < std::min(all_, wish(group));
}

Found QuickPlay::best_variant(const Point& point, double limit_s) {
  Found best{kInfinity, point};
  const auto trial = [&](const Point& other) {
    const double seconds = this->seconds(other, std::min(limit_s, best.seconds));
    if (seconds < best.seconds) best = {seconds, other, depth_};
  };
  const std::vector<int>& recomputes = rules.recomputes;
  Point other = point;
  other.limits.clear();
  bool is_short = true;
  for (std::size_t k = 0; k < rules.shardings.size() && is_short; ++k) {
    std::ranges::fill(other.sharding, rules.shardings[k]);
    std::ranges::fill(other.recompute, recomputes[0]);
    trial(other);
    is_short = best.seconds == kInfinity;
    for (int g = 0; g < point.groups() && !is_short; ++g) is_short = this->is_short(g);
    for (std::size_t r = 1; r < recomputes.size() && is_short; ++r) {
      std::ranges::fill(other.recompute, recomputes[0]);
      save_where_short(other, recomputes[r]);
      const auto count = std::ranges::count(other.recompute, recomputes[r]);
      if (0 < count && count < other.groups()) trial(other);
      std::ranges::fill(other.recompute, recomputes[r]);
      trial(other);
    }
  }
  other = best.point;
  std::vector<int> tried;
  for (other.depth = rules.shallowest; other.depth <= rules.deepest; ++other.depth) {
    if (other.depth == point.depth) continue;
    trial(other);
    // So are all that are deeper: there is no more memory, or there are no more micro-batches.
    if (depth_ == tried) break;
    tried = depth_;
  }
  return best;
}

std::vector<Found> QuickPlay::neighbours(const Point& point, double limit_s, int most) {
  std::vector<Found> found;
  const auto trial = [&](const Point& other) {
    if (!rules.allows(other)) return;
    const double seconds = this->seconds(other, limit_s);
    if (seconds < limit_s) found.push_back({seconds, other, depth_});
  };
  seconds(point, 0);
  const std::vector<int> depths = depth_;
  std::vector<char> may_save;  // whether a group is short of memory, or saves some
  for (int g = 0; g < point.groups(); ++g)
    may_save.push_back(is_short(g) || point.recompute[g] != rules.recomputes[0] ||
                       point.sharding[g] != rules.shardings[0]);
  const int groups = point.groups(), stages = point.stages(), most_in_flight = all_;
  const bool straight = rules.has_one_stage_each();
  for (int s = 1; s < stages; ++s)
    for (const int step : {1, -1, 2, -2}) {
      Point other = point;
      const int cut = other.cuts[s] += step;
      if (point.cuts[s - 1] < cut && cut < point.cuts[s + 1]) trial(other);
    }
  for (int g = 0; g < groups; ++g) {
    if (!may_save[g]) continue;
    for (const int recompute : rules.recomputes)
      for (const int sharding : rules.shardings) {
        if (recompute == point.recompute[g] && sharding == point.sharding[g]) continue;
        Point other = point;
        other.recompute[g] = recompute;
        other.sharding[g] = sharding;
        trial(other);
      }
  }
  const auto keeping = std::ranges::count(point.recompute, rules.recomputes[0]);
  if (keeping + 1 < groups) {
    Point other = point;
    std::ranges::fill(other.recompute, rules.recomputes[0]);
    trial(other);
  }
  for (const int step : {1, -1}) {
    Point other = point;
    other.limits.clear();
    other.size += step;
    if (0 <= other.size && other.size < static_cast<int>(rules.sizes.size())) trial(other);
    other.size = point.size;
    other.depth += step;
    if (rules.shallowest <= other.depth && other.depth <= rules.deepest) trial(other);
  }
  if (is_strict() && rules.shallowest < rules.deepest) {
    Point other = point;
    for (int s = 0; s < stages; ++s)
      for (const int step : {1, -1}) {
        other.limits = depths;
        const int depth = other.limits[s] += step;
        // Depths never grow along the pipeline.
        if (depth < 1 || depth > most_in_flight || (s > 0 && depth > depths[s - 1])) continue;
        if (s + 1 < stages && depth < depths[s + 1]) continue;
        trial(other);
      }
    other.limits = depths;
    for (int& depth : other.limits) depth = std::min(depth + 1, most_in_flight);
    trial(other);
  }
  for (int g = 1; g < groups; ++g) {
    Point other = point;
    swap_groups(other, g);
    if (other.order != point.order) trial(other);
    if (straight) {
      other.cuts[g] = other.cuts[g - 1] + other.cuts[g + 1] - other.cuts[g];
      if (other.cuts[g] != point.cuts[g]) trial(other);
      other = point;
      join_groups(other, g, true);
      trial(other);
    }
  }
  const int devices = static_cast<int>(point.order.size());
  for (int giver = 0; giver <= groups; ++giver) {
    const int end = giver < groups ? point.starts[giver + 1] : devices;
    if (end - point.starts[giver] < 1 + (giver < groups)) continue;
    for (int taker = 0; taker <= groups; ++taker) {
      // Neighbours exchange devices, and any group does with the unused ones.
      if (giver == taker || (std::abs(giver - taker) > 1 && giver < groups && taker < groups)) continue;
      Point other = point;
      give_device(other, giver < taker ? end - 1 : point.starts[giver], giver, taker);
      trial(other);
    }
  }
  for (int g = 0; straight && g < groups; ++g) {
    const int lo = point.cuts[g], hi = point.cuts[g + 1];
    const int width = point.starts[g + 1] - point.starts[g];
    if (hi - lo < 2) continue;
    const int unused = devices - point.starts.back();
    for (const int taken : {0, std::min(unused, width)}) {
      if (taken == 0 && width < 2) continue;
      Point other = point;
      split_group(other, g, taken ? width : width / 2, taken, (lo + hi) / 2);
      trial(other);
    }
  }
  std::ranges::stable_sort(found, {}, &Found::seconds);
  if (static_cast<int>(found.size()) > most) found.resize(most);
  return found;
}

}  // namespace penstock
