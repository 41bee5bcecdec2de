#include "layers.hpp"

namespace penstock {

bool SharedParameter::is_used_in(Run run) const {
  return std::ranges::any_of(layers, [&](int layer) { return is_in(run, layer); });
}

bool SharedParameter::is_only_in(Run run) const {
  return !layers.empty() && std::ranges::all_of(layers, [&](int layer) { return is_in(run, layer); });
}

double Layers::parameter_bytes(Run run) const {
  double bytes = own_bytes[run.hi] - own_bytes[run.lo];
  for (const SharedParameter& parameter : shared)
    if (parameter.is_used_in(run)) bytes += parameter.bytes;
  return bytes;
}

double Layers::whole_bytes(Run run) const {
  double bytes = own_bytes[run.hi] - own_bytes[run.lo];
  for (const SharedParameter& parameter : shared)
    if (parameter.is_only_in(run)) bytes += parameter.bytes;
  return bytes;
}

std::vector<double> Layers::two_layers_from(int lo) const {
  const int cuts = static_cast<int>(own_bytes.size());
  std::vector<double> sums(cuts), most(cuts);
  for (int hi = lo + 1; hi < cuts; ++hi) {
    sums[hi] = parameter_bytes({lo, hi});
    most[hi] = std::max(most[hi - 1], sums[hi] - sums[std::max(lo, hi - 2)]);
  }
  return most;
}

RunTensors Layers::tensors_of(Run run, const std::vector<Run>& earlier) const {
  RunTensors found;
  for_received_tensors(*this, run, earlier, [&](const Tensor& tensor) {
    found.received = found.received + tensor.bytes;
    found.received_gradients = found.received_gradients + tensor.gradient_bytes;
  });
  int last_made = -1;
  for (const Tensor& tensor : tensors) {
    if (!is_in(run, tensor.producer) || tensor.consumer < run.hi || tensor.number == last_made)
      continue;
    last_made = tensor.number;
    found.made = found.made + tensor.bytes;
    found.made_gradients = found.made_gradients + tensor.gradient_bytes;
  }
  return found;
}

std::pair<std::vector<Affine>, std::vector<Affine>> Layers::crossing() const {
  std::vector<Affine> down(own_bytes.size()), up(own_bytes.size());
  for (std::size_t k = 0; k < tensors.size(); ++k) {
    const Tensor& tensor = tensors[k];
    const bool is_first = k == 0 || tensors[k - 1].number != tensor.number;
    for (int cut = is_first ? tensor.producer + 1 : tensors[k - 1].consumer + 1;
         cut <= tensor.consumer; ++cut) {
      down[cut] = down[cut] + tensor.bytes;
      up[cut] = up[cut] + tensor.gradient_bytes;
    }
  }
  return {down, up};
}

RunCosts run_costs(const Layers& layers, const std::vector<int>& cuts, Sharding sharding,
                   double state) {
  const auto at_cuts = [&](const std::vector<Affine>& sums) {
    std::vector<Affine> kept;
    for (const int cut : cuts) kept.push_back(sums.at(cut));
    return kept;
  };
  std::vector<double> parameters, held, whole, divided;
  std::vector<Affine> inputs;
  for (const int lo : cuts) {
    // Bytes read from earlier layers, each tensor where its first reader from `lo` on is.
    std::vector<Affine> read(layers.own_bytes.size());
    const Run rest = {lo, static_cast<int>(read.size()) - 1};
    for_received_tensors(layers, rest, {}, [&](const Tensor& tensor) {
      read[tensor.consumer + 1] = read[tensor.consumer + 1] + tensor.bytes;
    });
    for (std::size_t k = 1; k < read.size(); ++k) read[k] = read[k - 1] + read[k];
    std::vector<double> two(read.size());
    if (sharding == Sharding::parameters) two = layers.two_layers_from(lo);
    for (const int hi : cuts) {
      const double bytes = layers.parameter_bytes({lo, hi});
      const auto held_by = [&](Sharding what, double devices) {
        return held_bytes(what, devices, bytes, two[hi], 2, state) + layers.besides_bytes({lo, hi});
      };
      parameters.push_back(bytes);
      inputs.push_back(read[hi]);
      held.push_back(held_by(Sharding::none, 1));
      if (sharding == Sharding::none) continue;
      whole.push_back(held_by(sharding, kInfinity));
      divided.push_back(held_by(sharding, 1) - whole.back());
    }
  }
  const int count = static_cast<int>(cuts.size());
  const auto [down, up] = layers.crossing();
  return {{at_cuts(layers.forward), at_cuts(layers.backward), at_cuts(layers.saved),
           at_cuts(layers.norms), layers.again, layers.rules},
          at_cuts(down),
          at_cuts(up),
          {count, parameters},
          {count, held},
          {count, whole},
          {count, divided},
          sharding == Sharding::parameters,
          {count, inputs}};
}

RunBytes run_bytes(const Layers& layers, Run run, Affine inputs, double rows) {
  double workspace = 0;
  for (int layer = run.lo; layer < run.hi; ++layer)
    workspace = std::max(workspace, layers.workspace[layer].at(rows));
  return {sum_of(layers.saved, run, rows), inputs.at(rows), workspace};
}

GradientShare share_of(const Group& group, int segment, double bytes, const ReduceRules& rules) {
  const int count = static_cast<int>(std::ceil(bytes / rules.bucket_bytes));
  return {segment, count, group.all_reduce_s(bytes / count), bytes / count};
}

double Hardware::crowding(std::span<const int> members) const {
  double factor = 1;
  for (const int device : members) {
    const int host = devices[device].host, slots = hosts[host].full_speed_devices;
    if (slots == 0) continue;
    const auto busy =
        std::ranges::count_if(members, [&](int other) { return devices[other].host == host; });
    factor = std::max(factor, static_cast<double>(busy) / slots);
  }
  return factor;
}

void Hardware::set_group(Group& group, double step_s_per_byte, std::span<const int> members,
                         std::span<const int> rows) const {
  double slowest = kInfinity;
  group.kinds.clear();
  for (std::size_t i = 0; i < members.size(); ++i) {
    const Machine& machine = devices[members[i]];
    group.kinds.push_back(
        {static_cast<double>(rows[i]), machine.speed, machine.memory_bytes, machine.chip});
    slowest = std::min(slowest, machine.speed);
  }
  group.crowding = crowding(members);
  group.replicas = static_cast<int>(members.size());
  group.step_s_per_byte = step_s_per_byte * group.crowding / slowest;
}

}  // namespace penstock
