// Bindings of orders on ideal links and of PipeDream's program; `native.pyi` describes them.
#include <nanobind/stl/array.h>

#include "bind.hpp"
#include "ideal_play.hpp"
#include "levels.hpp"
#include "list_orders.hpp"

namespace penstock {
namespace {

using Whole = Array<std::int64_t, 1>;
using Doubles = Array<double, 1>;

/// An array of Python in C order, to write.
template <class T, std::size_t kDimensions = 1>
using Target = nb::ndarray<T, nb::ndim<kDimensions>, nb::c_contig, nb::device::cpu>;

void make_pipe(IdealPipe* self, int stages, int micro_batches, const Array<double, 2>& seconds,
               const Doubles& transfer_s) {
  new (self) IdealPipe{stages, micro_batches, numbers(seconds), numbers(transfer_s)};
}

Codes codes(const Whole& actions) { return {actions.data(), actions.size()}; }

/// The actions of some orders; throws unless they are of the pipeline, and each of one order.
Codes checked(const IdealPipe& pipe, const std::vector<int>& first, const Whole& actions) {
  const Codes all = codes(actions);
  if (first.empty() || first[0] != 0 || first.back() != static_cast<int>(all.size()) ||
      !std::is_sorted(first.begin(), first.end()))
    throw std::invalid_argument("the orders must cover all actions");
  for (const std::int64_t action : all)
    if (action < 0 || action / pipe.cells() > static_cast<int>(Pass::again))
      throw std::invalid_argument("an action has no stage or micro-batch that exists");
  return all;
}

std::vector<int> play(const IdealPipe& pipe, const std::vector<int>& first, const Whole& actions,
                      const Target<double>& start_s) {
  return play_orders(pipe, first, checked(pipe, first, actions), start_s.data());
}

double fill(const IdealPipe& pipe, const HeldLimits& limits, const std::vector<int>& first,
            const Whole& actions, double slack_s, const Target<std::int64_t>& out) {
  return fill_gaps(pipe, limits, first, checked(pipe, first, actions), slack_s, out.data());
}

void rearrange_v(const IdealPipe& pipe, const HeldLimits& limits,
                 const Array<std::int64_t, 2>& ranks, std::vector<int> deepest, bool patient,
                 double slack_s, const Target<std::int64_t>& out) {
  const std::size_t each = ranks.shape(1);
  const Ranking ranking{
      {ranks.data(), each}, {ranks.data() + each, each}, std::move(deepest), patient};
  rearrange(pipe, limits, ranking, slack_s, out.data());
}

void make_list_pipe(ListPipe* self, int stages, int indices, bool is_split,
                    const Array<std::int64_t, 2>& counts, const Array<double, 2>& costs,
                    const Doubles& limit_bytes, const Doubles& work_s) {
  const int places = static_cast<int>(counts.shape(1)), groups = static_cast<int>(work_s.size());
  new (self) ListPipe{stages, places / stages, indices, is_split, {}, {}, numbers(limit_bytes),
                      numbers(work_s), {0}};
  std::vector<std::pair<int, int>> members;
  std::vector<std::int64_t> actions(groups);
  for (int q = 0; q < places; ++q) {
    const auto count = [&](int row) { return static_cast<int>(counts(row, q)); };
    self->places.push_back({count(0), q / stages, count(1), count(2),
                            {costs(0, q), costs(1, q), costs(2, q)},
                            costs(3, q), costs(4, q), costs(5, q), costs(6, q)});
    members.emplace_back(count(0), q);
    actions.at(count(0)) += (is_split ? 3 : 2) * count(1);
  }
  self->members = Lists(groups, members);
  for (const std::int64_t own : actions)
    self->order_starts.push_back(self->order_starts.back() + own);
}

double list_order(const ListPipe& pipe, const Array<double, 3>& keys, const Whole& depth,
                  const std::array<double, 6>& prices, double best_s,
                  const Target<std::int64_t>& order) {
  const auto& [idle, overlap, pending, weight_overlap, forward_delay_s, lead_s] = prices;
  const Wishes wishes{keys.data(), depth.data(), idle,           overlap,
                      pending,     weight_overlap, forward_delay_s, lead_s};
  return ListPlay(pipe, wishes, order.data()).run(best_s);
}

void divide(const Target<double, 3>& seconds, const Target<std::int64_t, 3>& choice,
            const Array<double, 3>& unit_s, const Array<std::int64_t, 2>& unit,
            const Array<double, 2>& least_s, const Array<double, 2>& parameter_bytes,
            const Doubles& reduce_each, const Doubles& move_s) {
  const auto size = [&](int axis) { return static_cast<int>(seconds.shape(axis)); };
  const LevelCosts costs{size(1),         unit_s.data(), unit.data(), least_s.data(),
                         parameter_bytes.data(), reduce_each.data(), move_s.data()};
  divide_level(costs, {size(0), size(1), size(2), seconds.data(), choice.data()});
}

}  // namespace

void bind_orders(nb::module_& module) {
  nb::class_<IdealPipe>(module, "IdealPipe")
      .def("__init__", make_pipe, "stages"_a, "micro_batches"_a, "seconds"_a, "transfer_s"_a);
  nb::class_<HeldLimits>(module, "HeldLimits")
      .def(nb::init<int, std::vector<int>, std::vector<int>, std::vector<double>,
                    std::vector<double>, std::vector<double>>(),
           "most"_a, "group"_a, "in_flight"_a, "saved"_a, "kept"_a, "memory"_a);
  nb::class_<ListPipe>(module, "ListPipe")
      .def("__init__", make_list_pipe, "stages"_a, "indices"_a, "is_split"_a, "counts"_a,
           "costs"_a, "limit_bytes"_a, "work_s"_a);
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  module.def("play_orders", play, "pipe"_a, "first"_a, "actions"_a, "start_s"_a, unlocked);
  module.def("fill_gaps", fill, "pipe"_a, "limits"_a, "first"_a, "actions"_a, "slack_s"_a, "out"_a,
             unlocked);
  module.def("rearrange", rearrange_v, "pipe"_a, "limits"_a, "ranks"_a, "deepest"_a, "patient"_a,
             "slack_s"_a, "out"_a, unlocked);
  module.def("list_order", list_order, "pipe"_a, "keys"_a, "depth"_a, "prices"_a, "best_s"_a,
             "order"_a, unlocked);
  module.def("divide_level", divide, "seconds"_a, "choice"_a, "unit_s"_a, "unit"_a, "least_s"_a,
             "parameter_bytes"_a, "reduce_each"_a, "move_s"_a, unlocked);
}

}  // namespace penstock
