// Code shared by the files that bind the core.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "costs.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace penstock {

/// An array of Python in C order, to read.
template <class T, std::size_t kDimensions>
using Array = nb::ndarray<const T, nb::ndim<kDimensions>, nb::c_contig, nb::device::cpu>;

std::vector<double> numbers(const auto& array) {
  return {array.data(), array.data() + array.size()};
}

void bind_orders(nb::module_& module);
void bind_planners(nb::module_& module);
void bind_walk(nb::module_& module);
void bind_work(nb::module_& module);

}  // namespace penstock
