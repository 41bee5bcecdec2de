// What Python sees of the core; `native.pyi` describes it.
#include "bind.hpp"

#include <nanobind/stl/array.h>
#include <nanobind/stl/tuple.h>

#include "play.hpp"

namespace penstock {
namespace {

using Whole = Array<std::int64_t, 1>;
using Hosts = std::vector<int>;
using Connections = std::vector<std::tuple<int, int, const BoundaryTimes*>>;

void make_orders(Orders* self, const Whole& start, const Whole& words, int streams_each,
                 std::vector<int> groups, std::vector<int> rounds, int micro_batches,
                 int iterations) {
  new (self) Orders{{start.data(), start.data() + start.size()},
                    {},
                    streams_each,
                    std::move(groups),
                    std::move(rounds),
                    micro_batches,
                    iterations};
  self->actions.reserve(words.size());
  for (std::size_t k = 0; k < words.size(); ++k) self->actions.push_back({words.data()[k]});
  self->check();
}

void make_parts(Parts* self, std::vector<const StageTimes*> stages, const Connections& connections,
                std::vector<const TieTimes*> ties, std::vector<HostRules> hosts, bool in_order) {
  new (self) Parts{std::move(stages), {}, std::move(ties), std::move(hosts), in_order};
  for (const auto& [producer, consumer, boundary] : connections)
    self->connections.push_back({producer, consumer, boundary});
}

double iteration_s(const Parts& parts, const Orders& orders) {
  const nb::gil_scoped_release others_may_run;
  return Play(parts, orders).run();
}

Spans play(const Parts& parts, const Orders& orders, bool steps_together) {
  const nb::gil_scoped_release others_may_run;
  Spans made;
  made.end_s = Play(parts, orders, &made, steps_together).run();
  return made;
}

/// A view of spans as rows of start and end; it keeps them alive.
template <std::vector<Span> Spans::* spans>
auto rows(const Spans& self) {
  const std::vector<Span>& found = self.*spans;
  return nb::ndarray<nb::numpy, const double, nb::shape<-1, 2>>(found.data(), {found.size(), 2},
                                                                nb::find(self));
}

void bind_work(nb::module_& module) {
  nb::class_<ReplicaTimes>(module, "ReplicaTimes")
      .def(nb::init<int, int, bool, bool, std::array<double, kTimedKinds>, std::vector<double>>(),
           "device"_a, "host"_a, "overlaps"_a, "streams_messages"_a, "seconds"_a, "segments_s"_a);
  nb::class_<StageTimes>(module, "StageTimes")
      .def(nb::init<std::vector<ReplicaTimes>, std::vector<int>, std::vector<double>, Hosts,
                    Hosts>(),
           "replicas"_a, "buckets_of_segment"_a, "buckets_s"_a, "outgoing"_a, "incoming"_a);
  nb::class_<PairTimes>(module, "PairTimes")
      .def(nb::init<int, int, double, double, bool, bool, bool>(), "sender"_a, "receiver"_a,
           "forward_s"_a, "backward_s"_a, "returns"_a, "forward_uses_port"_a,
           "backward_uses_port"_a);
  nb::class_<BoundaryTimes>(module, "BoundaryTimes")
      .def(nb::init<std::vector<PairTimes>>(), "pairs"_a);
  nb::class_<TieTimes>(module, "TieTimes")
      .def(nb::init<std::vector<int>, std::vector<double>, Hosts, Hosts>(), "instances"_a,
           "buckets_s"_a, "outgoing"_a, "incoming"_a);
  nb::class_<HostRules>(module, "HostRules")
      .def(nb::init<int, bool, bool>(), "full_speed_devices"_a, "half_duplex"_a,
           "separate_links"_a)
      .def_ro("full_speed_devices", &HostRules::full_speed_devices)
      .def_ro("half_duplex", &HostRules::half_duplex)
      .def_ro("separate_links", &HostRules::separate_links);
  // It points to what its arguments hold.
  nb::class_<Parts>(module, "PartTimes")
      .def("__init__", make_parts, "stages"_a, "connections"_a, "ties"_a, "hosts"_a,
           "in_order"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>());
  nb::class_<Orders>(module, "Orders")
      .def("__init__", make_orders, "start"_a, "words"_a, "streams_each"_a, "groups"_a, "rounds"_a,
           "micro_batches"_a, "iterations"_a);
}

void bind_play(nb::module_& module) {
  nb::class_<Spans>(module, "Spans")
      .def_prop_ro("actions", rows<&Spans::actions>)
      .def_prop_ro("items", rows<&Spans::items>)
      .def_ro("end_s", &Spans::end_s);
  module.def("iteration_s", iteration_s, "parts"_a, "orders"_a);
  module.def("play", play, "parts"_a, "orders"_a, "steps_together"_a);
}

}  // namespace
}  // namespace penstock

NB_MODULE(native, module) {
  nb::set_leak_warnings(false);  // Caches of Python live until the process ends.
  module.attr("version") = PENSTOCK_VERSION;
  module.attr("sources") = PENSTOCK_SOURCES;
  penstock::bind_work(module);
  penstock::bind_play(module);
  penstock::bind_orders(module);
  penstock::bind_walk(module);
  penstock::bind_planners(module);
}
