#include "part_costs.hpp"

#include <map>
#include <numeric>
#include <set>

namespace penstock {
namespace {

/// Time of predicting weights as a fraction of an optimizer step, by memory traffic.
///
/// SGD with momentum: a prediction reads weights and momentum and writes weights, 3 passes. A step
/// clears gradients, computes their norm and scales them (4 passes), then reads gradients, momentum
/// and weights and writes the last two (5 passes).
constexpr double kPredictionShare = 1 / 3.0;

/// Seconds for which a device itself cannot compute because of a message. Neighbours on the same
/// device are not considered: their tensors are not sent at all.
double message_s(const Machine& machine, Affine bytes, int rows) {
  const double moved = bytes.at(rows), rate = machine.message_bytes_per_s;
  return moved > 0 ? machine.message_s + (rate > 0 ? moved / rate : 0) : 0;
}

/// Scale the parts of an action so that their sum is `whole_s`.
void stretch(std::vector<double>& parts_s, double whole_s) {
  const double sum_s = std::accumulate(parts_s.begin(), parts_s.end(), 0.0);
  if (sum_s == 0) parts_s.back() = whole_s;
  else for (double& part_s : parts_s) part_s *= whole_s / sum_s;
}

/// Makes the replicas of one stage, whose last backward has segments that end at some layers.
///
///     seconds = layer seconds of its rows / speed, at least parameter bytes / off-chip rate
///
/// The off-chip rate counts if the parameters exceed the on-chip memory: then every action reads
/// them again. What the device itself needs for the messages of an action comes on top, and so does
/// the exchange of batch norm's statistics, during which all replicas wait.
class ReplicaCosts {
 public:
  ReplicaCosts(const Layers& layers, const StageQuestion& question, const Group& group, double state,
               const std::vector<int>& segment_layers)
      : layers_(layers), question_(question), run_(question.run), group_(group),
        segment_layers_(segment_layers), tensors_(layers.tensors_of(run_, question.earlier)),
        parameters_(layers.parameter_bytes(run_)) {
    const double two =
        question.sharding == Sharding::parameters ? layers.two_layers_from(run_.lo)[run_.hi] : 0;
    held_ = held_bytes(question.sharding, group.replicas, parameters_, two, question.versions + 1, state);
    if (!gathers()) return;
    const auto bytes_up_to = [&](int cut) { return layers.parameter_bytes({run_.lo, cut}); };
    forward_s_ = layers.gathered_s(group, run_, true, bytes_up_to);
    backward_s_ = layers.gathered_s(group, run_, false, bytes_up_to);
  }

  /// Its messages are a part of its actions.
  bool gathers() const { return question_.sharding == Sharding::parameters && group_.replicas > 1; }

  void set(ReplicaWork& replica, const Machine& machine) const {
    const auto seconds = [&](const std::vector<Affine>& sums, Run run) {
      return sum_of(sums, run, replica.rows) / machine.speed;
    };
    const auto message = [&](Affine bytes) { return message_s(machine, bytes, replica.rows); };
    const double read_s = machine.chip.read_s(parameters_);
    const double begins_s = layers_.begin_s / machine.speed;
    // By block each backward begins with the forward, whose layers are in the sums already.
    const double begins_back_s =
        layers_.begin_back_s / machine.speed + (layers_.again ? begins_s : 0);
    const double received_s = message(tensors_.made_gradients);
    const double sent_s = message(tensors_.received_gradients);
    const double forward_s =
        std::max(read_s, gathers() ? forward_s_ : seconds(layers_.forward, run_)) +
        layers_.norms_s(group_, run_, true) + begins_s;
    const double backward_s =
        std::max(read_s, gathers() ? backward_s_ : seconds(layers_.backward, run_));
    const double weight_s = std::max(read_s, seconds(layers_.weight, run_));
    const double more_s =
        begins_back_s + received_s + sent_s + layers_.norms_s(group_, run_, false);
    replica.seconds = {forward_s + message(tensors_.received) + message(tensors_.made),
                       backward_s + more_s,
                       std::max(read_s, seconds(layers_.input, run_)) + more_s,
                       weight_s,
                       forward_s,
                       group_.step_s(parameters_, gathers()) / machine.speed *
                           (1 + kPredictionShare * question_.predictions)};

    std::vector<double>& parts_s = replica.segments_s;
    for_segments([&](Run run) {
      parts_s.push_back(seconds(question_.split ? layers_.weight : layers_.backward, run));
    });
    if (read_s > 0 || gathers()) stretch(parts_s, question_.split ? weight_s : backward_s);
    if (!question_.split) {
      // It receives before the first segment, and sends after the last one.
      auto part_s = parts_s.begin();
      for_segments([&](Run run) { *part_s++ += layers_.norms_s(group_, run, false); });
      parts_s.front() += received_s + begins_back_s;
      parts_s.back() += sent_s;
    }
    replica.memory = memory(replica.rows);
  }

 private:
  template <class Each>
  void for_segments(Each each) const {
    int upper = run_.hi;
    for (const int lower : segment_layers_) each(Run{lower, std::exchange(upper, lower)});
  }

  /// Without a flush several versions of the parameters are kept
  /// (`penstock.schedule.weight_rule`), and each micro-batch keeps its own in the autocast type.
  StageMemory memory(int rows) const {
    const RunBytes bytes = run_bytes(layers_, run_, tensors_.received, rows);
    const double casts = layers_.cast_bytes[run_.hi] - layers_.cast_bytes[run_.lo];
    const double buffers = layers_.buffer_bytes[run_.hi] - layers_.buffer_bytes[run_.lo];
    const bool casts_once = question_.versions == 1;
    return {held_ + buffers + (casts_once ? casts : 0), bytes.saved + (casts_once ? 0 : casts),
            std::max(0.0, bytes.inputs), bytes.workspace};
  }

  const Layers& layers_;
  const StageQuestion& question_;
  const Run run_;
  const Group& group_;
  const std::vector<int>& segment_layers_;
  const RunTensors tensors_;
  const double parameters_;
  double held_ = 0, forward_s_ = 0, backward_s_ = 0;  // passes of devices that divide parameters
};

/// The tensors that one pair sends in one direction.
struct Load {
  int tensors = 0;
  double bytes = 0;

  /// Add a tensor; one without bytes is not sent.
  void add(double size) {
    tensors += size > 0;
    bytes += std::max(0.0, size);
  }
};

bool are_alike(const ReplicaWork& one, const ReplicaWork& other, const std::vector<Machine>& all) {
  const Machine &a = all[one.device], &b = all[other.device];
  return one.rows == other.rows && a.speed == b.speed && a.chip == b.chip &&
         a.message_s == b.message_s && a.message_bytes_per_s == b.message_bytes_per_s;
}

}  // namespace

/// The gradients that replicas reduce among themselves go from the last layer to the first.
/// Parameters tied within the stage are complete only at the end of the backward, since the first
/// layer may use them.
StageWork PartCosts::stage(const StageQuestion& question) const {
  const int replicas = static_cast<int>(question.devices.size());
  Group group{{}, 1, replicas, layers_.step_s_per_byte, question.all_reduces};
  StageWork made{question.run, question.earlier, {}, {}, {}};
  for (int i = 0; i < replicas; ++i) {
    const Machine& machine = hardware_.devices.at(question.devices[i]);
    const int rows = question.rows.at(i);
    made.replicas.push_back({question.devices[i], machine.host, rows, machine.overlaps,
                             machine.streams_messages, machine.memory_bytes, {}, {}, {}});
    if (group.kinds.empty() || !are_alike(made.replicas[i], made.replicas[i - 1], hardware_.devices))
      group.kinds.push_back({static_cast<double>(rows), machine.speed, 0, machine.chip});
  }
  std::vector<int>& ends = made.segment_layers;
  if (question.reduces && replicas > 1 && question.sharding != Sharding::parameters) {
    const auto add = [&](int segment, double bytes) {
      made.gradients.add(share_of(group, segment, bytes, layers_.rules));
    };
    for_buckets(layers_.own_bytes, question.run, layers_.rules.bucket_bytes,
                [&](int layer, double bytes) {
                  add(static_cast<int>(ends.size()), bytes);
                  ends.push_back(layer);
                });
    if (ends.empty() || ends.back() != question.run.lo) ends.push_back(question.run.lo);
    for (const SharedParameter& parameter : layers_.shared)
      if (parameter.bytes > 0 && parameter.is_only_in(question.run))
        add(static_cast<int>(ends.size()) - 1, parameter.bytes);
    if (!made.gradients.shares.empty()) made.gradients.ports = ports_of(question.devices);
  } else {
    ends = {question.run.lo};
  }
  const ReplicaCosts costs(layers_, question, group, state_, ends);
  for (int i = 0; i < replicas; ++i) {
    ReplicaWork& replica = made.replicas[i];
    if (i > 0 && are_alike(replica, made.replicas[i - 1], hardware_.devices)) {
      replica.seconds = made.replicas[i - 1].seconds;
      replica.segments_s = made.replicas[i - 1].segments_s;
      replica.memory = made.replicas[i - 1].memory;
    } else {
      costs.set(replica, hardware_.devices[replica.device]);
    }
  }
  return made;
}

Boundary PartCosts::boundary(const StageWork& producer, const StageWork& consumer) const {
  const int senders = static_cast<int>(producer.replicas.size());
  const int receivers = static_cast<int>(consumer.replicas.size());
  std::vector<int> rows;
  for (const StageWork* stage : {&producer, &consumer})
    for (const ReplicaWork& replica : stage->replicas) rows.push_back(replica.rows);
  struct Loads {
    Load down = {}, up = {};
    bool returns = false;
  };
  std::map<std::pair<int, int>, Loads> loads;
  const auto for_overlaps = [&](auto each) {
    for_shared_rows(rows, {0, senders}, {senders, senders + receivers},
                    [&](int i, int j, int shared) { each(i, j - senders, shared); });
  };
  if (producer.run.hi == consumer.run.lo)
    for_overlaps([&](int i, int j, int) { loads[{i, j}].returns = true; });
  for_received_tensors(layers_, consumer.run, consumer.earlier, [&](const Tensor& tensor) {
    if (!is_in(producer.run, tensor.producer)) return;
    const auto add = [&](int i, int j, int shared) {
      Loads& pair = loads[{i, j}];
      pair.down.add(tensor.bytes.at(shared));
      pair.up.add(tensor.gradient_bytes.at(shared));
      pair.returns |= tensor.gradient_bytes.at(shared) > 0;
    };
    if (tensor.goes_whole())
      for (int j = 0; j < receivers; ++j) add(j % senders, j, 1);
    else
      for_overlaps(add);
  });
  Boundary made;
  const Links& links = hardware_.links;
  for (const auto& [ends, pair] : loads) {
    const int source = producer.replicas[ends.first].device;
    const int target = consumer.replicas[ends.second].device;
    const std::size_t there = links.of(source, target), back = links.of(target, source);
    const auto seconds = [&](std::size_t link, const Load& load) {
      const bool is_sent = load.tensors > 0 && source != target;
      return is_sent ? links.message_s(link, load.tensors, load.bytes) : 0;
    };
    made.pairs.push_back({ends.first, ends.second, seconds(there, pair.down), pair.down.bytes,
                          pair.returns, seconds(back, pair.up), pair.up.bytes,
                          links.uses_port[there] != 0, links.uses_port[back] != 0});
  }
  return made;
}

TiedGroup PartCosts::tie(std::vector<int> instances, const std::vector<double>& sizes,
                         const std::vector<int>& devices,
                         std::vector<ReduceCost> all_reduces) const {
  TiedGroup made{std::move(instances), {{}, ports_of(devices)}};
  const Group group{{}, 1, static_cast<int>(devices.size()), 0, std::move(all_reduces)};
  if (devices.size() > 1)
    for (const double bytes : sizes)
      made.gradients.add(share_of(group, -1, bytes, layers_.rules));
  return made;
}

std::vector<std::pair<int, int>> PartCosts::connected(const std::vector<int>& cuts,
                                                      const std::vector<int>& homes) const {
  std::set<std::pair<int, int>> found;
  for (int s = 0; s + 2 < static_cast<int>(cuts.size()); ++s) found.emplace(s, s + 1);
  std::vector<int> stage_of_layer;
  for_sent_tensors(layers_, cuts, [&](int s) { return homes.at(s); }, stage_of_layer,
                   [&](int s, int t, const Tensor&) { found.emplace(s, t); });
  return {found.begin(), found.end()};
}

/// Those of hosts where some pair of devices has no link of its own.
Ports PartCosts::ports_of(const std::vector<int>& devices) const {
  const Links& links = hardware_.links;
  std::set<int> outgoing, incoming;
  for (const int i : devices) {
    const int host = hardware_.devices[i].host;
    const auto sends = [&](int j) { return links.uses_port[links.of(i, j)] != 0; };
    const auto receives = [&](int j) { return links.uses_port[links.of(j, i)] != 0; };
    if (!outgoing.contains(host) && std::ranges::any_of(devices, sends)) outgoing.insert(host);
    if (!incoming.contains(host) && std::ranges::any_of(devices, receives)) incoming.insert(host);
  }
  return {{outgoing.begin(), outgoing.end()}, {incoming.begin(), incoming.end()}};
}

StageWork summed_last(StageWork work) {
  for (ReplicaWork& replica : work.replicas)
    replica.segments_s = {
        std::accumulate(replica.segments_s.begin(), replica.segments_s.end(), 0.0)};
  work.segment_layers = {work.segment_layers.back()};
  for (GradientShare& share : work.gradients.shares) share.segment = 0;
  return work;
}

}  // namespace penstock
