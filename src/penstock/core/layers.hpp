// The layers of a profile and the devices of a cluster, in tables of the size of both.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "costs.hpp"
#include "work.hpp"

namespace penstock {

/// A tensor that one layer makes and another one reads.
struct Tensor {
  int producer, consumer, number;
  Affine bytes, gradient_bytes;

  /// It has no rows, so every replica that reads it gets all of it.
  bool goes_whole() const { return bytes.fixed > 0 && bytes.each == 0; }
};

/// A parameter that several layers use.
struct SharedParameter {
  double bytes;
  std::vector<int> layers;

  bool is_used_in(Run run) const;
  bool is_only_in(Run run) const;
};

/// Bytes of the tensors that a run of layers receives and makes for later ones, each once, and of
/// their gradients.
struct RunTensors {
  Affine received, received_gradients, made, made_gradients;
};

/// The costs of the layers of a profile. Tensors are sorted by number and consumer.
struct Layers : LayerSums {
  std::vector<Affine> input, weight;  // the halves of backwards, up to each cut
  std::vector<double> own_bytes;      // parameters that only one layer uses, up to each cut
  std::vector<double> buffer_bytes, cast_bytes;
  std::vector<Affine> workspace;  // of each layer
  std::vector<SharedParameter> shared;
  std::vector<Tensor> tensors;
  double begin_s, begin_back_s;  // of every forward and backward of a stage, beside its layers
  double step_s_per_byte;

  /// Bytes of parameters; those that layers share count once.
  double parameter_bytes(Run run) const;
  /// The same of what no other layers use.
  double whole_bytes(Run run) const;
  /// Buffers and frozen parameters, and parameters in the autocast type.
  double besides_bytes(Run run) const {
    return buffer_bytes[run.hi] - buffer_bytes[run.lo] + cast_bytes[run.hi] - cast_bytes[run.lo];
  }
  /// Parameters of the two largest layers that follow one another from `lo` to each cut.
  std::vector<double> two_layers_from(int lo) const;
  /// `earlier` are those of the same home as the run (`Plan.homes`).
  RunTensors tensors_of(Run run, const std::vector<Run>& earlier) const;
  /// Bytes of the tensors that cross each cut, each once, and of their gradients.
  std::pair<std::vector<Affine>, std::vector<Affine>> crossing() const;
};

/// The tables of a chain whose stages may begin and end at some cuts, where their devices divide
/// what `sharding` says. `state` are the optimizer's bytes for each byte of parameters.
RunCosts run_costs(const Layers& layers, const std::vector<int>& cuts, Sharding sharding,
                   double state);

/// Bytes that a replica keeps of a micro-batch, without recompute and with it, and needs while it
/// computes.
struct RunBytes {
  double saved, inputs, workspace;
};
RunBytes run_bytes(const Layers& layers, Run run, Affine inputs, double rows);

/// A part of a run's gradients, in equal buckets of about the size that collectives sum at once.
GradientShare share_of(const Group& group, int segment, double bytes, const ReduceRules& rules);

/// Call `each(layer, bytes)` for every bucket: going backwards, the layer at which it is full, or
/// for the last one the first layer that has any bytes. `sums` are bytes up to each cut.
template <class Each>
void for_buckets(const std::vector<double>& sums, Run run, double bucket_bytes, Each each) {
  int stop = run.hi, lowest = run.hi;
  for (int layer = run.hi - 1; layer >= run.lo; --layer) {
    if (sums[layer] == sums[layer + 1]) continue;
    lowest = layer;
    if (sums[stop] - sums[layer] < bucket_bytes) continue;
    each(layer, sums[stop] - sums[layer]);
    stop = layer;
  }
  if (lowest < stop) each(lowest, sums[stop] - sums[lowest]);
}

inline bool is_in(Run run, int layer) { return run.lo <= layer && layer < run.hi; }

/// Call `each(tensor)` for every tensor that a run of layers receives from before it: once, however
/// many of its layers read it, and not if one of the `earlier` runs has received it.
template <class Each>
void for_received_tensors(const Layers& layers, Run run, const std::vector<Run>& earlier,
                          Each each) {
  int last_tensor = -1;
  for (const Tensor& tensor : layers.tensors) {
    const auto receives = [&](Run one) {
      return tensor.producer < one.lo && is_in(one, tensor.consumer);
    };
    const bool here = receives(run);
    if (tensor.number == last_tensor || !(here || std::ranges::any_of(earlier, receives))) continue;
    last_tensor = tensor.number;
    if (here) each(tensor);
  }
}

/// Call `each(s, t, tensor)` for every tensor that stage s sends to the home of a later stage t:
/// once, however many stages of that home read it (`Plan.senders`), and not within a home.
/// `stage_of_layer` is overwritten.
template <class HomeOf, class Each>
void for_sent_tensors(const Layers& layers, const std::vector<int>& cuts, HomeOf home_of,
                      std::vector<int>& stage_of_layer, Each each) {
  stage_of_layer.resize(cuts.back());
  for (int s = 0; s + 1 < static_cast<int>(cuts.size()); ++s)
    std::fill(stage_of_layer.begin() + cuts[s], stage_of_layer.begin() + cuts[s + 1], s);
  int last_tensor = -1;
  std::vector<int> reached;
  for (const Tensor& tensor : layers.tensors) {
    const int s = stage_of_layer[tensor.producer], t = stage_of_layer[tensor.consumer];
    if (s == t) continue;
    if (tensor.number != last_tensor) reached.assign(1, home_of(s));
    last_tensor = tensor.number;
    if (std::ranges::find(reached, home_of(t)) != reached.end()) continue;
    reached.push_back(home_of(t));
    each(s, t, tensor);
  }
}

/// Places of a group in an order of devices: first .. last - 1.
struct Places {
  int first, last;
};

/// Call `each(i, j, shared)` for all places i and j that have rows of a micro-batch in common.
template <class Each>
void for_shared_rows(const std::vector<int>& rows, Places from, Places to, Each each) {
  int i = from.first, j = to.first, left_i = rows[i], left_j = rows[j];
  while (i < from.last && j < to.last) {
    const int shared = std::min(left_i, left_j);
    each(i, j, shared);
    left_i -= shared;
    left_j -= shared;
    if (left_i == 0 && ++i < from.last) left_i = rows[i];
    if (left_j == 0 && ++j < to.last) left_j = rows[j];
  }
}

/// A device; `penstock.cluster.cluster.Device` says what its numbers mean.
struct Machine {
  double speed, memory_bytes;
  int host;
  ChipMemory chip;
  bool overlaps, streams_messages;
  double message_s, message_bytes_per_s;
};

/// The links from each device to each device, row after row. They belong to Python.
struct Links {
  const double *bytes_per_s, *latency_s;
  const std::uint8_t* uses_port;
  int devices;
  double sum_step_s;  // the least seconds of a step of an all-reduce

  std::size_t of(int source, int target) const {
    return static_cast<std::size_t>(source) * devices + target;
  }
  double message_s(std::size_t link, int tensors, double bytes) const {
    return penstock::message_s(tensors, latency_s[link], bytes, bytes_per_s[link]);
  }
};

/// The devices of a cluster.
struct Hardware {
  std::vector<Machine> devices;
  std::vector<HostRules> hosts;
  Links links;

  /// By how much devices slow one another down on hosts with too few cores.
  double crowding(std::span<const int> members) const;
  /// Set all but the all-reduces of a group of devices with these rows each.
  void set_group(Group& group, double step_s_per_byte, std::span<const int> members,
                 std::span<const int> rows) const;
};

}  // namespace penstock
