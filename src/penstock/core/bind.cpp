// What Python sees of the core; `native.pyi` describes it.
#include <nanobind/nanobind.h>

NB_MODULE(native, module) {
  module.attr("version") = PENSTOCK_VERSION;
  module.attr("sources") = PENSTOCK_SOURCES;
}
