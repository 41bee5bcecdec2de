// What Python sees of costs, loads and walks; `native.pyi` describes it.
#include "bind.hpp"
#include "quick_play.hpp"

namespace penstock {
namespace {

using Floats = Array<double, 1>;
using Pairs = Array<double, 2>;
using Tables = Array<double, 3>;

void make_runs(RunCosts* self, const std::vector<Pairs>& sums, const Pairs& parameters,
               const std::vector<Pairs>& held, std::pair<bool, bool> ways, const Tables& inputs,
               const ReduceRules& rules) {
  const int cuts = static_cast<int>(parameters.shape(0));
  const auto kept = [&](std::size_t part) {
    return part < held.size() ? PerRun<double>(cuts, numbers(held[part])) : PerRun<double>();
  };
  new (self) RunCosts{affine(sums.at(0)),          affine(sums.at(1)),
                      affine(sums.at(2)),          affine(sums.at(3)),
                      {cuts, numbers(parameters)}, kept(0),
                      kept(1),                     kept(2),
                      ways.first,                  ways.second,
                      {cuts, affine(inputs)},
                      rules};
}

double gathered_pass_s(const std::vector<double>& gathers_s, const std::vector<double>& computes_s,
                       bool scatters) {
  GatheredPass pass;
  for (std::size_t k = 0; k < gathers_s.size(); ++k)
    pass.add(gathers_s[k], computes_s.at(k), scatters ? gathers_s[k] : 0);
  return pass.seconds();
}

void make_links(Links* self, const Pairs& bytes_per_s, const Pairs& both_ways_bytes_per_s,
                const Pairs& latency_s, const Array<std::uint8_t, 2>& uses_port,
                double sum_step_s) {
  new (self) Links{bytes_per_s.data(), both_ways_bytes_per_s.data(), latency_s.data(),
                   uses_port.data(), static_cast<int>(latency_s.shape(0)), sum_step_s};
}

void make_costs(SearchCosts* self, const RunCosts& runs, const Pairs& weight, const Pairs& layers,
                double step_s_per_byte, const Array<std::int64_t, 2>& edges,
                const Pairs& edge_bytes, std::vector<Machine> devices,
                std::vector<HostRules> hosts, const Links& links) {
  new (self) SearchCosts{runs, affine(weight), {}, {}, step_s_per_byte, {}, std::move(devices),
                         std::move(hosts), links};
  for (std::size_t k = 0; k < layers.shape(1); ++k) {
    self->parameter_bytes.push_back(layers(0, k));
    self->workspace.push_back({layers(1, k), layers(2, k)});
  }
  for (std::size_t k = 0; k < edges.shape(1); ++k) {
    const auto end = [&](int row) { return static_cast<int>(edges(row, k)); };
    self->tensors.push_back({end(0), end(1), end(2), {edge_bytes(0, k), edge_bytes(1, k)},
                             {edge_bytes(2, k), edge_bytes(3, k)}});
  }
}

void make_question(LoadQuestion* self, int recompute, double power, bool steady) {
  new (self) LoadQuestion{static_cast<RecomputeMode>(recompute), {static_cast<int>(power), steady}};
}

void make_rules(PointRules* self, int style, int rounds, bool split, int batch,
                std::vector<int> sizes, std::pair<int, int> groups, std::pair<int, int> depths,
                std::pair<std::vector<int>, std::vector<int>> savings, std::vector<int> cut) {
  new (self) PointRules{static_cast<Style>(style), rounds,        split,         batch,
                        std::move(sizes),          groups.first,  groups.second, depths.first,
                        depths.second,             savings.first, savings.second, std::move(cut)};
}

double load_s(const SearchCosts& costs, const PointRules& rules, const Point& point,
              LoadQuestion asked) {
  return PlanLoad(costs, rules, asked).seconds(point);
}

StageCost stage_cost(const SearchCosts& costs, const std::vector<int>& devices, int lo, int hi,
                     int size, int micro_batches) {
  std::vector<int> rows(devices.size());
  return StageCosts(costs, false).of(devices, rows, {lo, hi}, size, micro_batches);
}

StageSeconds stage_seconds(const SearchCosts& costs, const std::vector<int>& devices,
                           const std::vector<int>& rows, std::pair<int, int> run,
                           std::vector<ReduceCost> all_reduces) {
  return StageCosts(costs, false)
      .seconds(devices, rows, {run.first, run.second}, std::move(all_reduces));
}

std::vector<int> rows_of(const SearchCosts& costs, const std::vector<int>& devices, int size) {
  std::vector<int> rows(devices.size());
  StageCosts(costs, false).split_rows(devices, rows, size);
  return rows;
}

void bind_costs(nb::module_& module) {
  nb::class_<ReduceRules>(module, "ReduceRules")
      .def(nb::init<double, double, double>(), "bucket_bytes"_a, "statistic_bytes"_a,
           "statistics_s"_a);
  nb::class_<RunCosts>(module, "RunCosts")
      .def("__init__", make_runs, "sums"_a, "parameters"_a, "held"_a, "ways"_a,
           "inputs"_a, "rules"_a);
  nb::class_<Machine>(module, "Machine")
      .def(nb::init<double, double, int, ChipMemory>(), "speed"_a, "memory_bytes"_a, "host"_a,
           "chip"_a);
  // Links and whatever has them point to the arrays.
  nb::class_<Links>(module, "Links")
      .def("__init__", make_links, "bytes_per_s"_a, "both_ways_bytes_per_s"_a, "latency_s"_a,
           "uses_port"_a, "sum_step_s"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
           nb::keep_alive<1, 5>());
  nb::class_<SearchCosts>(module, "SearchCosts")
      .def("__init__", make_costs, "runs"_a, "weight"_a, "layers"_a, "step_s_per_byte"_a,
           "edges"_a, "edge_bytes"_a, "devices"_a, "hosts"_a, "links"_a, nb::keep_alive<1, 10>());
  nb::class_<StageCost>(module, "StageCost")
      .def_ro("forward_s", &StageCost::forward_s)
      .def_ro("backward_s", &StageCost::backward_s)
      .def_ro("after_s", &StageCost::after_s)
      .def_ro("kept", &StageCost::kept)
      .def_ro("leaner", &StageCost::leaner);
  nb::class_<StageSeconds>(module, "StageSeconds")
      .def_ro("forward_s", &StageSeconds::forward_s)
      .def_ro("backward_s", &StageSeconds::backward_s)
      .def_ro("weight_s", &StageSeconds::weight_s)
      .def_ro("whole_s", &StageSeconds::whole_s)
      .def_ro("after_s", &StageSeconds::after_s);
  nb::class_<RunBytes>(module, "RunBytes")
      .def_ro("saved", &RunBytes::saved)
      .def_ro("inputs", &RunBytes::inputs)
      .def_ro("workspace", &RunBytes::workspace);
}

}  // namespace

void bind_walk(nb::module_& module) {
  bind_costs(module);
  nb::class_<Point>(module, "Point")
      .def(nb::init<std::vector<int>, std::vector<int>, std::vector<int>, std::vector<int>,
                    std::vector<int>, std::vector<int>, int, int>(),
           "order"_a, "starts"_a, "cuts"_a, "recompute"_a, "sharding"_a,
           "limits"_a = std::vector<int>(), "size"_a = 0, "depth"_a = 0)
      .def(nb::init<const Point&>(), "other"_a)
      .def_ro("order", &Point::order)
      .def_ro("starts", &Point::starts)
      .def_ro("cuts", &Point::cuts)
      .def_ro("recompute", &Point::recompute)
      .def_ro("sharding", &Point::sharding)
      .def_rw("limits", &Point::limits)
      .def_ro("size", &Point::size)
      .def_rw("depth", &Point::depth)
      .def_prop_ro("groups", &Point::groups)
      .def("__eq__", [](const Point& self, const Point& other) { return self == other; });
  nb::class_<PointRules>(module, "PointRules")
      .def("__init__", make_rules, "style"_a, "rounds"_a, "split"_a, "batch"_a, "sizes"_a,
           "groups"_a, "depths"_a, "savings"_a, "cut"_a)
      .def_prop_ro("style", [](const PointRules& self) { return static_cast<int>(self.style); })
      .def_ro("rounds", &PointRules::rounds)
      .def_ro("split", &PointRules::split)
      .def_ro("sizes", &PointRules::sizes)
      .def_ro("least_groups", &PointRules::least_groups)
      .def_ro("most_groups", &PointRules::most_groups)
      .def_ro("recomputes", &PointRules::recomputes)
      .def_ro("shardings", &PointRules::shardings)
      .def("allows", &PointRules::allows, "point"_a);
  nb::class_<LoadQuestion>(module, "LoadQuestion")
      .def("__init__", make_question, "recompute"_a, "power"_a, "steady"_a);
  nb::class_<WalkPlan>(module, "WalkPlan")
      .def(nb::init<LoadQuestion, double, int, std::uint32_t>(), "asked"_a, "heat"_a, "steps"_a,
           "seed"_a);
  nb::class_<Found>(module, "Found")
      .def_ro("seconds", &Found::seconds)
      .def_ro("point", &Found::point)
      .def_ro("depths", &Found::depths);
  nb::class_<QuickPlay>(module, "QuickPlay")
      .def(nb::init<std::vector<const SearchCosts*>, PointRules>(), "costs"_a, "rules"_a,
           nb::keep_alive<1, 2>())
      .def_ro("rules", &QuickPlay::rules)
      .def_ro("spent", &QuickPlay::spent)
      .def_prop_ro("depths", &QuickPlay::depths)
      .def_rw("simulates_all", &QuickPlay::simulates_all)
      .def("seconds", &QuickPlay::seconds, "point"_a, "limit_s"_a)
      .def("even_cuts", &QuickPlay::even_cuts, "point"_a)
      .def("best_variant", &QuickPlay::best_variant, "point"_a, "limit_s"_a)
      .def("neighbours", &QuickPlay::neighbours, "point"_a, "limit_s"_a, "most"_a);
  module.def("gathered_pass_s", gathered_pass_s, "gathers_s"_a, "computes_s"_a, "scatters"_a);
  module.def("stage_cost", stage_cost, "costs"_a, "devices"_a, "lo"_a, "hi"_a, "size"_a,
             "micro_batches"_a);
  module.def("stage_seconds", stage_seconds, "costs"_a, "devices"_a, "rows"_a, "run"_a,
             "all_reduces"_a);
  module.def("run_bytes", [](const SearchCosts& costs, std::pair<int, int> run, double rows) {
    return run_bytes(costs, {run.first, run.second}, rows);
  }, "costs"_a, "run"_a, "rows"_a);
  module.def("held_bytes", [](const SearchCosts& costs, std::pair<int, int> run, int replicas) {
    return costs.runs.held({run.first, run.second}, replicas);
  }, "costs"_a, "run"_a, "replicas"_a);
  module.def("rows_of", rows_of, "costs"_a, "devices"_a, "size"_a);
  module.def("load_s", load_s, "costs"_a, "rules"_a, "point"_a, "asked"_a);
  module.def("random_walk", random_walk, "costs"_a, "rules"_a, "start"_a, "walk"_a,
             nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace penstock
