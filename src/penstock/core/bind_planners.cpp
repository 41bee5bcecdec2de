// Bindings of the planners' dynamic programs; `native.pyi` describes them.
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>

#include <map>

#include "bind.hpp"
#include "dapple.hpp"
#include "slowest_stage.hpp"
#include "spp.hpp"

namespace penstock {
namespace {

using Pairs = Array<double, 2>;
using Members = std::vector<std::pair<int, int>>;

void make_costs(GroupCosts* self, const RunCosts& runs, const Hardware& hardware,
                double step_s_per_byte, const std::vector<std::pair<int, Pairs>>& workspaces,
                const std::vector<Members>& groups,
                const std::vector<std::vector<ReduceCost>>& all_reduces) {
  new (self) GroupCosts{runs, {}, {}};
  std::map<int, int> tables;  // by rows; where no layer needs any, the first one serves all
  for (const auto& [rows, workspace] : workspaces) {
    tables[rows] = static_cast<int>(self->workspaces.size());
    self->workspaces.emplace_back(runs.cuts(), numbers(workspace));
  }
  Group all;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    std::vector<int> devices, rows;
    for (const auto& [device, own] : groups[g]) {
      devices.push_back(device);
      rows.push_back(own);
    }
    hardware.set_group(all, step_s_per_byte, devices, rows);
    Group& group = self->groups.emplace_back(all);
    group.all_reduces = all_reduces.at(g);
    group.kinds.clear();
    for (ReplicaKind kind : all.kinds) {
      const auto table = tables.find(static_cast<int>(kind.rows));
      kind.workspace = table == tables.end() ? 0 : table->second;
      if (std::ranges::find(group.kinds, kind) == group.kinds.end()) group.kinds.push_back(kind);
    }
  }
}

void make_spp_table(SppTable* self, const GroupCosts& costs, const Network& network,
                    std::vector<int> groups, std::vector<int> width, std::vector<int> depths,
                    int micro_batches, int recompute, bool drains) {
  const int stages = static_cast<int>(depths.size());
  const int blocks = static_cast<int>(groups.size() / width.size());
  const auto choice = static_cast<RecomputeChoice>(recompute);
  new (self) SppTable(costs, network,
                      {stages, blocks, std::move(groups), std::move(width), std::move(depths),
                       micro_batches, choice, drains});
}

/// One field of all states, by stages, first cut, first block and number of the first width.
template <auto field>
auto column(const SppTable& self) {
  const SppQuestion& question = self.question();
  const std::size_t blocks = question.blocks, widths = question.widths(), cuts = self.cuts();
  using Value = std::remove_cvref_t<decltype(self.states()[0].*field)>;
  static_assert(sizeof(Value) == 8 && sizeof(SppState) % 8 == 0);
  constexpr std::int64_t each = sizeof(SppState) / 8;
  const std::int64_t by_width = each, by_block = by_width * question.widths(),
                     by_cut = by_block * question.blocks, by_stage = by_cut * self.cuts();
  return nb::ndarray<nb::numpy, const Value, nb::ndim<4>>(
      &(self.states()[0].*field), {static_cast<std::size_t>(question.stages), cuts, blocks, widths},
      nb::find(self), {by_stage, by_cut, by_block, by_width});
}

std::pair<double, std::vector<std::array<int, 3>>> dapple(const GroupCosts& costs,
                                                          const Network& network,
                                                          const DappleQuestion& question,
                                                          double limit_s) {
  const nb::gil_scoped_release others_may_run;
  const DapplePlan best = dapple_plan(costs, network, question, limit_s);
  std::vector<std::array<int, 3>> stages;
  for (const Taken& taken : best.steps) stages.push_back({taken.cut, taken.end, taken.step});
  return {best.seconds, stages};
}

std::vector<Column> columns_of(const std::vector<double>& forward_s,
                               const std::vector<double>& backward_s,
                               const std::vector<double>& after_s) {
  std::vector<Column> columns;
  for (std::size_t k = 0; k < forward_s.size(); ++k)
    columns.push_back({forward_s.at(k), backward_s.at(k), after_s.at(k)});
  return columns;
}

double closed_form_s(const std::vector<double>& forward_s, const std::vector<double>& backward_s,
                     const std::vector<double>& after_s, int micro_batches) {
  const std::vector<Column> columns = columns_of(forward_s, backward_s, after_s);
  return latency_s(columns.data(), static_cast<int>(columns.size()), micro_batches);
}

int closed_form_pivot(const std::vector<double>& forward_s, const std::vector<double>& backward_s,
                      int micro_batches) {
  const std::vector<Column> columns =
      columns_of(forward_s, backward_s, std::vector<double>(forward_s.size()));
  return pivot_of(columns.data(), static_cast<int>(columns.size()), micro_batches);
}

double transfer_s(const Network& network, int sender, int receiver, double fixed, double each) {
  std::vector<MessageLoad> loads;
  Transfers(network).loads(sender, receiver, loads);
  return Transfers::seconds(loads, {fixed, each});
}

/// A cost of a run of layers on a group, by their numbers.
template <double (RunCosts::*cost)(const Group&, Run) const>
double cost_of(const GroupCosts& self, int group, int lo, int hi) {
  return (self.*cost)(self.groups.at(group), {lo, hi});
}

int fit_of(const GroupCosts& self, int group, int lo, int hi, int depth, int recompute) {
  const auto choice = static_cast<RecomputeChoice>(recompute);
  return static_cast<int>(self.fit(self.groups.at(group), {lo, hi}, depth, choice));
}

/// The bytes of the replica that needs most.
double needed_bytes_of(const GroupCosts& self, int group, int lo, int hi, int depth,
                       bool recompute) {
  double most = 0;
  const Group& own = self.groups.at(group);
  for (const ReplicaKind& kind : own.kinds)
    most = std::max(most, self.needed_bytes(own, kind, {lo, hi}, depth, recompute));
  return most;
}

/// One field of all states, by first block and first cut.
template <auto field>
auto row_column(const SlowestStageTable& self) {
  using Value = std::remove_cvref_t<decltype(self.states()[0].*field)>;
  constexpr std::int64_t each = sizeof(SlowestStageState) / 8;
  const std::size_t rows = self.rows(), cuts = self.cuts();
  return nb::ndarray<nb::numpy, const Value, nb::ndim<2>>(
      &(self.states()[0].*field), {rows, cuts}, nb::find(self),
      {each * self.cuts(), each});
}

void make_slowest_table(SlowestStageTable* self, const GroupCosts& costs, std::vector<int> width,
                        std::vector<WindowLoad> windows, const Array<double, 1>& crossing_bytes,
                        int recompute, bool balanced) {
  const int blocks = static_cast<int>(windows.size() / width.size());
  const auto choice = static_cast<RecomputeChoice>(recompute);
  new (self) SlowestStageTable(costs, {blocks, std::move(width), std::move(windows),
                                       numbers(crossing_bytes), choice, balanced});
}

void make_dapple_question(DappleQuestion* self, int micro_batches, int size, int recompute,
                          int most_stages, std::vector<int> depths,
                          const Array<double, 1>& least_s, std::vector<DappleStep> steps,
                          std::vector<Occupancy> places) {
  const int count = static_cast<int>(steps.size());
  places.push_back({count, 0, 0, 0});
  new (self) DappleQuestion{micro_batches,
                            size,
                            static_cast<RecomputeChoice>(recompute),
                            most_stages,
                            std::move(depths),
                            numbers(least_s),
                            std::move(steps),
                            std::move(places)};
}

}  // namespace

void bind_planners(nb::module_& module) {
  nb::class_<ReduceCost>(module, "AllReduceCost")
      .def(nb::init<double, double>(), "latency_s"_a, "s_per_byte"_a)
      .def_ro("latency_s", &ReduceCost::latency_s)
      .def_ro("s_per_byte", &ReduceCost::s_per_byte)
      .def("of", &ReduceCost::of, "bytes"_a)
      .def("__getstate__",
           [](const ReduceCost& self) { return std::pair(self.latency_s, self.s_per_byte); })
      .def("__setstate__", [](ReduceCost& self, std::pair<double, double> state) {
        new (&self) ReduceCost{state.first, state.second};
      });
  module.def("multiply_all_reduces", [](double factor) { ReduceCost::factor = factor; },
             "factor"_a);
  nb::class_<ChipMemory>(module, "ChipMemory")
      .def(nb::init<double, double>(), "bytes"_a, "off_chip_bytes_per_s"_a)
      .def("read_s", &ChipMemory::read_s, "parameter_bytes"_a);
  nb::class_<GroupCosts>(module, "GroupCosts")
      .def("__init__", make_costs, "runs"_a, "hardware"_a, "step_s_per_byte"_a, "workspaces"_a,
           "groups"_a, "all_reduces"_a)
      .def_prop_ro("cuts", &RunCosts::cuts)
      .def("forward_s", cost_of<&RunCosts::forward_s>, "group"_a, "lo"_a, "hi"_a)
      .def("backward_s", cost_of<&RunCosts::backward_s>, "group"_a, "lo"_a, "hi"_a)
      .def("micro_batch_s", cost_of<&RunCosts::micro_batch_s>, "group"_a, "lo"_a, "hi"_a)
      .def("after_s", cost_of<&RunCosts::after_s>, "group"_a, "lo"_a, "hi"_a)
      .def("fit", fit_of, "group"_a, "lo"_a, "hi"_a, "depth"_a, "recompute"_a)
      .def("needed_bytes", needed_bytes_of, "group"_a, "lo"_a, "hi"_a, "depth"_a, "recompute"_a);
  nb::class_<Network>(module, "LinkNetwork")
      .def(nb::init<const Hardware&, std::vector<Members>>(),
           "hardware"_a, "groups"_a, nb::keep_alive<1, 2>());
  nb::class_<SppTable>(module, "SppTable")
      .def("__init__", make_spp_table, "costs"_a, "network"_a, "groups"_a, "width"_a, "depths"_a,
           "micro_batches"_a, "recompute"_a, "drains"_a, nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 3>())
      .def_prop_ro("seconds", column<&SppState::seconds>)
      .def_prop_ro("passed_s", column<&SppState::passed_s>)
      .def_prop_ro("slowest_s", column<&SppState::slowest_s>)
      .def_prop_ro("end", column<&SppState::end>)
      .def_prop_ro("next_number", column<&SppState::next_number>)
      .def_prop_ro("recompute", column<&SppState::recompute>);
  nb::class_<WindowLoad>(module, "WindowLoad")
      .def(nb::init<int, int, int, double, double, double>(), "group"_a, "depth"_a, "replicas"_a,
           "before_s_per_byte"_a, "after_s_per_byte"_a, "parameter_s_per_byte"_a);
  nb::class_<SlowestStageTable>(module, "SlowestStageTable")
      .def("__init__", make_slowest_table, "costs"_a, "width"_a, "windows"_a, "crossing_bytes"_a,
           "recompute"_a, "balanced"_a, nb::keep_alive<1, 2>())
      .def_prop_ro("seconds", row_column<&SlowestStageState::seconds>)
      .def_prop_ro("end", row_column<&SlowestStageState::end>)
      .def_prop_ro("number", row_column<&SlowestStageState::number>);
  nb::class_<DappleStep>(module, "DappleStep")
      .def(nb::init<int, int>(), "target"_a, "group"_a);
  nb::class_<Occupancy>(module, "Occupancy")
      .def(nb::init<int, int, double, double>(), "first_step"_a, "rest_group"_a, "speed_left"_a,
           "idle"_a)
      .def_ro("rest_group", &Occupancy::rest_group);
  nb::class_<DappleQuestion>(module, "DappleQuestion")
      .def("__init__", make_dapple_question, "micro_batches"_a, "size"_a, "recompute"_a,
           "most_stages"_a, "depths"_a, "least_s"_a, "steps"_a, "places"_a);
  module.def("dapple_latency_s", closed_form_s, "forward_s"_a, "backward_s"_a, "after_s"_a,
             "micro_batches"_a);
  module.def("dapple_pivot", closed_form_pivot, "forward_s"_a, "backward_s"_a, "micro_batches"_a);
  module.def("transfer_s", transfer_s, "network"_a, "sender"_a, "receiver"_a, "fixed"_a, "each"_a);
  module.def("dapple_plan", dapple, "costs"_a, "network"_a, "question"_a, "limit_s"_a);
}

}  // namespace penstock
