// Bindings of the work of plans; `native.pyi` describes them.
#include <nanobind/stl/tuple.h>

#include "bind.hpp"
#include "part_costs.hpp"

namespace penstock {
namespace {

using Whole = Array<std::int64_t, 1>;
using Table = Array<double, 2>;
using Cuts = std::pair<int, int>;

/// Sums of costs up to each cut, from a row for each part of a cost.
std::vector<Affine> sums_of(const Table& layers, int row) {
  std::vector<Affine> made(1);
  for (std::size_t k = 0; k < layers.shape(1); ++k)
    made.push_back(made.back() + Affine{layers(row, k), layers(row + 1, k)});
  return made;
}

std::vector<double> byte_sums_of(const Table& layers, int row) {
  std::vector<double> made(1);
  for (std::size_t k = 0; k < layers.shape(1); ++k) made.push_back(made.back() + layers(row, k));
  return made;
}

void make_layers(Layers* self, const Table& layers, const Array<std::int64_t, 2>& edges,
                 const Table& edge_bytes,
                 const std::vector<std::pair<double, std::vector<int>>>& shared,
                 std::tuple<double, double, double> stage, bool again, const ReduceRules& rules) {
  const std::vector<Affine> input = sums_of(layers, 2), weight = sums_of(layers, 4);
  new (self) Layers{{sums_of(layers, 0), {{}}, sums_of(layers, 6), sums_of(layers, 8), again, rules},
                    input,
                    weight,
                    byte_sums_of(layers, 12),
                    byte_sums_of(layers, 13),
                    byte_sums_of(layers, 14),
                    {},
                    {},
                    {},
                    std::get<0>(stage),
                    std::get<1>(stage),
                    std::get<2>(stage)};
  for (std::size_t k = 0; k < layers.shape(1); ++k) {
    self->backward.push_back(self->backward.back() +
                             Affine{layers(2, k) + layers(4, k), layers(3, k) + layers(5, k)});
    self->workspace.push_back({layers(10, k), layers(11, k)});
  }
  for (const auto& [bytes, users] : shared) self->shared.push_back({bytes, users});
  for (std::size_t k = 0; k < edges.shape(1); ++k) {
    const auto end = [&](int row) { return static_cast<int>(edges(row, k)); };
    self->tensors.push_back({end(0), end(1), end(2), {edge_bytes(0, k), edge_bytes(1, k)},
                             {edge_bytes(2, k), edge_bytes(3, k)}});
  }
}

template <std::vector<Affine> LayerSums::* sums>
double seconds_of_run(const Layers& self, Cuts run, double rows) {
  return sum_of(self.*sums, {run.first, run.second}, rows);
}

/// The layer at which the first bucket of a stage's gradients is complete.
int first_bucket(const Layers& self, Cuts run) {
  int found = -1;
  for_buckets(self.own_bytes, {run.first, run.second}, self.rules.bucket_bytes,
              [&](int layer, double) { found = std::max(found, layer); });
  return found;
}

void make_links(Links* self, const Table& bytes_per_s, const Table& latency_s,
                const Array<std::uint8_t, 2>& uses_port, double sum_step_s) {
  new (self) Links{bytes_per_s.data(), latency_s.data(), uses_port.data(),
                   static_cast<int>(latency_s.shape(0)), sum_step_s};
}

StageWork stage_of(const PartCosts& self, Cuts run, const std::vector<Cuts>& earlier,
                   std::vector<int> devices, std::vector<int> rows, int sharding,
                   std::tuple<bool, int, bool, int> use, std::vector<ReduceCost> all_reduces) {
  const auto [split, versions, reduces, predictions] = use;
  std::vector<Run> runs;
  for (const auto& [lo, hi] : earlier) runs.push_back({lo, hi});
  return self.stage({{run.first, run.second}, std::move(runs), std::move(devices), std::move(rows),
                     static_cast<Sharding>(sharding), split, versions, reduces, predictions,
                     std::move(all_reduces)});
}

/// One field of all replicas.
template <auto field>
nb::object of_replicas(const StageWork& self) {
  nb::list made;
  for (const ReplicaWork& replica : self.replicas) made.append(replica.*field);
  return nb::tuple(made);
}

template <Kind kind>
double seconds_of(const ReplicaWork& self) {
  return self.of(kind);
}

double seconds_of_letter(const ReplicaWork& self, char kind) {
  const std::size_t number = std::string_view("FBIWR").find(kind);
  return self.seconds.at(number);
}

/// Bind the gradients that a stage or a tie sums.
template <class Group>
void bind_gradients(nb::class_<Group>& bound) {
  bound
      .def_prop_ro("shares",
                   [](const Group& self) -> const auto& { return self.gradients.shares; })
      .def_prop_ro("ports", [](const Group& self) -> const auto& { return self.gradients.ports; });
}

void bind_parts(nb::module_& module) {
  nb::class_<StageMemory>(module, "StageMemory")
      .def(nb::init<double, double, double, double>(), "fixed_bytes"_a, "saved_bytes"_a,
           "input_bytes"_a, "workspace_bytes"_a)
      .def_ro("fixed_bytes", &StageMemory::fixed_bytes)
      .def_ro("saved_bytes", &StageMemory::saved_bytes)
      .def_ro("input_bytes", &StageMemory::input_bytes)
      .def_ro("workspace_bytes", &StageMemory::workspace_bytes)
      .def("at", &StageMemory::at, "saved"_a, "inputs"_a);
  nb::class_<Holding>(module, "Holding")
      .def(nb::init<int, std::vector<std::pair<int, int>>>(), "running"_a, "held"_a);
  module.def("most_bytes", most_bytes, "memories"_a, "holdings"_a);
  nb::class_<ReplicaWork>(module, "ReplicaWork")
      .def_prop_ro("forward_s", seconds_of<Kind::forward>)
      .def_prop_ro("backward_s", seconds_of<Kind::backward>)
      .def_prop_ro("step_s", seconds_of<Kind::step>)
      .def("seconds", seconds_of_letter, "kind"_a)
      .def_ro("segments_s", &ReplicaWork::segments_s)
      .def_ro("memory", &ReplicaWork::memory);
  nb::class_<GradientShare>(module, "GradientShare")
      .def_ro("segment", &GradientShare::segment)
      .def_ro("buckets", &GradientShare::buckets)
      .def_ro("seconds", &GradientShare::seconds)
      .def_ro("bytes", &GradientShare::bytes);
  nb::class_<Ports>(module, "Ports")
      .def(nb::init<std::vector<int>, std::vector<int>>(), "outgoing"_a = std::vector<int>(),
           "incoming"_a = std::vector<int>())
      .def_ro("outgoing", &Ports::outgoing)
      .def_ro("incoming", &Ports::incoming);
  auto stage = nb::class_<StageWork>(module, "StageWork");
  bind_gradients(stage);
  stage.def_prop_ro("devices", of_replicas<&ReplicaWork::device>)
      .def_prop_ro("hosts", of_replicas<&ReplicaWork::host>)
      .def_prop_ro("overlaps", of_replicas<&ReplicaWork::overlaps>)
      .def_prop_ro("streams_messages", of_replicas<&ReplicaWork::streams_messages>)
      .def_ro("replicas", &StageWork::replicas)
      .def_prop_ro("size", [](const StageWork& self) { return self.replicas.size(); })
      .def_ro("segment_layers", &StageWork::segment_layers)
      .def("summed_last", [](const StageWork& self) { return summed_last(self); });
  nb::class_<Pair>(module, "Pair")
      .def_ro("sender", &Pair::sender)
      .def_ro("receiver", &Pair::receiver)
      .def_ro("forward_s", &Pair::forward_s)
      .def_ro("forward_bytes", &Pair::forward_bytes)
      .def_ro("returns", &Pair::returns)
      .def_ro("backward_s", &Pair::backward_s)
      .def_ro("backward_bytes", &Pair::backward_bytes)
      .def_ro("port_down", &Pair::port_down)
      .def_ro("port_up", &Pair::port_up);
  nb::class_<Boundary>(module, "Boundary").def_ro("pairs", &Boundary::pairs);
  auto tie = nb::class_<TiedGroup>(module, "TiedGroup");
  bind_gradients(tie);
  tie.def_ro("stages", &TiedGroup::instances);
}

void bind_tables(nb::module_& module) {
  nb::class_<ReduceRules>(module, "ReduceRules")
      .def(nb::init<double, double, double>(), "bucket_bytes"_a, "statistic_bytes"_a,
           "statistics_s"_a);
  nb::class_<Layers>(module, "Layers")
      .def("__init__", make_layers, "layers"_a, "edges"_a, "edge_bytes"_a, "shared"_a, "stage"_a,
           "again"_a, "rules"_a)
      .def("forward_s", seconds_of_run<&Layers::forward>, "run"_a, "rows"_a)
      .def("backward_s", seconds_of_run<&Layers::backward>, "run"_a, "rows"_a)
      .def("own_bytes",
           [](const Layers& self, Cuts run) {
             return self.own_bytes.at(run.second) - self.own_bytes.at(run.first);
           },
           "run"_a)
      .def("first_bucket", first_bucket, "run"_a)
      .def("crossing_bytes", [](const Layers& self, double rows) {
        std::vector<double> made;
        const auto [down, up] = self.crossing();
        for (std::size_t k = 0; k < down.size(); ++k) made.push_back((down[k] + up[k]).at(rows));
        return made;
      }, "rows"_a);
  nb::class_<Machine>(module, "Machine")
      .def(nb::init<double, double, int, ChipMemory, bool, bool, double, double>(), "speed"_a,
           "memory_bytes"_a, "host"_a, "chip"_a, "overlaps"_a, "streams_messages"_a,
           "message_s"_a, "message_bytes_per_s"_a);
  // Links and whatever has them point to the arrays.
  nb::class_<Links>(module, "Links")
      .def("__init__", make_links, "bytes_per_s"_a, "latency_s"_a, "uses_port"_a, "sum_step_s"_a,
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>());
  nb::class_<HostRules>(module, "HostRules")
      .def(nb::init<int, bool, bool>(), "full_speed_devices"_a, "half_duplex"_a,
           "separate_links"_a)
      .def_ro("full_speed_devices", &HostRules::full_speed_devices)
      .def_ro("half_duplex", &HostRules::half_duplex)
      .def_ro("separate_links", &HostRules::separate_links);
  nb::class_<Hardware>(module, "Hardware")
      .def(nb::init<std::vector<Machine>, std::vector<HostRules>, Links>(), "devices"_a,
           "hosts"_a, "links"_a, nb::keep_alive<1, 4>())
      .def_ro("hosts", &Hardware::hosts);
  nb::class_<PartCosts>(module, "PartCosts")
      .def(nb::init<const Layers&, const Hardware&, double>(), "layers"_a, "hardware"_a, "state"_a,
           nb::keep_alive<1, 3>())
      .def("stage", stage_of, "run"_a, "earlier"_a, "devices"_a, "rows"_a, "sharding"_a, "use"_a,
           "all_reduces"_a)
      .def("boundary", &PartCosts::boundary, "producer"_a, "consumer"_a)
      .def("tie", &PartCosts::tie, "instances"_a, "sizes"_a, "devices"_a, "all_reduces"_a)
      .def("connected", &PartCosts::connected, "cuts"_a, "homes"_a)
      .def("whole_bytes", &PartCosts::whole_bytes, "stage"_a);
}

void make_orders(Orders* self, const Whole& start, const Whole& words, int streams_each,
                 std::vector<int> groups, std::vector<int> rounds, std::pair<int, int> repeated,
                 std::vector<std::vector<Holding>> held) {
  new (self) Orders{{start.data(), start.data() + start.size()},
                    {},
                    streams_each,
                    std::move(groups),
                    std::move(rounds),
                    repeated.first,
                    repeated.second,
                    std::move(held)};
  self->actions.reserve(words.size());
  for (std::size_t k = 0; k < words.size(); ++k) self->actions.push_back({words.data()[k]});
  self->check();
}

void make_parts(Parts* self, std::vector<const StageWork*> stages,
                const std::vector<std::tuple<int, int, const Boundary*>>& connections,
                std::vector<const TiedGroup*> ties, std::vector<HostRules> hosts, bool in_order) {
  new (self) Parts{std::move(stages), {}, std::move(ties), std::move(hosts), in_order};
  for (const auto& [producer, consumer, boundary] : connections)
    self->connections.push_back({producer, consumer, boundary});
}

}  // namespace

void bind_work(nb::module_& module) {
  bind_parts(module);
  bind_tables(module);
  // It points to what its arguments hold.
  nb::class_<Parts>(module, "PlanParts")
      .def("__init__", make_parts, "stages"_a, "connections"_a, "ties"_a, "hosts"_a,
           "in_order"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>());
  nb::class_<Orders>(module, "Orders")
      .def("__init__", make_orders, "start"_a, "words"_a, "streams_each"_a, "groups"_a, "rounds"_a,
           "repeated"_a, "held"_a);
  module.def("fits", fits, "parts"_a, "orders"_a);
}

}  // namespace penstock
