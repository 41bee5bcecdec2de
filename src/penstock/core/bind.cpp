// Bindings of the core for Python; `native.pyi` describes them.
#include "bind.hpp"

#include "play.hpp"

namespace penstock {
namespace {

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
