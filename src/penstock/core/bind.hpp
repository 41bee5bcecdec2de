// What the files that bind the core have in common.
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

/// Costs from an array whose first half has the fixed parts, and whose second half those a row.
std::vector<Affine> affine(const auto& array) {
  std::vector<Affine> made;
  const std::size_t count = array.size() / 2;
  for (std::size_t k = 0; k < count; ++k)
    made.push_back({array.data()[k], array.data()[count + k]});
  return made;
}

void bind_orders(nb::module_& module);
void bind_planners(nb::module_& module);
void bind_walk(nb::module_& module);

}  // namespace penstock
