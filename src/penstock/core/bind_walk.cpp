// Bindings of costs, loads and walks; `native.pyi` describes them.
#include "bind.hpp"
#include "quick_play.hpp"

namespace penstock {
namespace {


void make_runs(RunCosts* self, const Layers& layers, const std::vector<int>& cuts, int sharding,
               double state) {
  new (self) RunCosts(run_costs(layers, cuts, static_cast<Sharding>(sharding), state));
}

/// A view of sums up to each cut: the fixed parts, then those of each row.
template <auto field>
auto sums_of(const RunCosts& self) {
  const std::vector<Affine>& sums = self.*field;
  return nb::ndarray<nb::numpy, const double, nb::ndim<2>>(&sums[0].fixed, {2, sums.size()},
                                                           nb::find(self), {1, 2});
}

/// A view of the bytes of each run, by its first and its last cut.
template <PerRun<double> RunCosts::* field>
auto table_of(const RunCosts& self) {
  const std::size_t cuts = self.cuts();
  return nb::ndarray<nb::numpy, const double, nb::ndim<2>>((self.*field).values().data(),
                                                           {cuts, cuts}, nb::find(self));
}

auto inputs_of(const RunCosts& self) {
  const std::size_t cuts = self.cuts();
  const std::int64_t row = 2 * self.cuts();
  return nb::ndarray<nb::numpy, const double, nb::ndim<3>>(
      &self.input_bytes.values()[0].fixed, {2, cuts, cuts}, nb::find(self), {1, row, 2});
}

auto held_by(const RunCosts& self, int devices) {
  const int cuts = self.cuts();
  auto* made = new std::vector<double>;
  const nb::capsule owner(made, [](void* old) noexcept {
    delete static_cast<std::vector<double>*>(old);
  });
  for (int lo = 0; lo < cuts; ++lo)
    for (int hi = 0; hi < cuts; ++hi) made->push_back(self.held({lo, hi}, devices));
  const std::size_t side = cuts;
  return nb::ndarray<nb::numpy, const double, nb::ndim<2>>(made->data(), {side, side}, owner);
}

double gathered_pass_s(const std::vector<double>& gathers_s, const std::vector<double>& computes_s,
                       bool scatters) {
  GatheredPass pass;
  for (std::size_t k = 0; k < gathers_s.size(); ++k)
    pass.add(gathers_s[k], computes_s.at(k), scatters ? gathers_s[k] : 0);
  return pass.seconds();
}

void make_costs(SearchCosts* self, const RunCosts& runs, const Layers& layers,
                const Hardware& hardware) {
  new (self) SearchCosts{layers, hardware, runs};
}

void make_question(LoadQuestion* self, int recompute, double power, bool steady) {
  new (self) LoadQuestion{static_cast<RecomputeMode>(recompute), static_cast<int>(power), steady};
}

void make_rules(PointRules* self, int style, int rounds, bool split, int batch,
                std::vector<int> sizes, std::pair<int, int> groups, std::pair<int, int> depths,
                std::pair<std::vector<int>, std::vector<int>> savings, std::vector<int> cut) {
  new (self) PointRules{static_cast<Style>(style), rounds,        split,         batch,
                        std::move(sizes),          groups.first,  groups.second, depths.first,
                        depths.second,             savings.first, savings.second, std::move(cut)};
}

double load_s(const SearchCosts& costs, const PointRules& rules, const Point& point,
              LoadQuestion question) {
  return PlanLoad(costs, rules, question).seconds(point);
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
  nb::class_<RunCosts>(module, "RunCosts")
      .def("__init__", make_runs, "layers"_a, "cuts"_a, "sharding"_a, "state"_a)
      .def_prop_ro("forward", sums_of<&RunCosts::forward>)
      .def_prop_ro("backward", sums_of<&RunCosts::backward>)
      .def_prop_ro("saved", sums_of<&RunCosts::saved>)
      .def_prop_ro("down", sums_of<&RunCosts::down>)
      .def_prop_ro("up", sums_of<&RunCosts::up>)
      .def_prop_ro("inputs", inputs_of)
      .def_prop_ro("parameters", table_of<&RunCosts::parameter_bytes>)
      .def_prop_ro("held", table_of<&RunCosts::held_bytes>)
      .def("held_by", held_by, "devices"_a);
  nb::class_<SearchCosts>(module, "SearchCosts")
      .def("__init__", make_costs, "runs"_a, "layers"_a, "hardware"_a, nb::keep_alive<1, 4>());
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
    const Run own = {run.first, run.second};
    return run_bytes(costs, own, costs.runs.input_bytes[own], rows);
  }, "costs"_a, "run"_a, "rows"_a);
  module.def("held_bytes", [](int sharding, double devices, double parameters, double two_layers,
                              double copies, double state) {
    return held_bytes(static_cast<Sharding>(sharding), devices, parameters, two_layers, copies,
                      state);
  }, "sharding"_a, "devices"_a, "parameters"_a, "two_layers"_a, "copies"_a, "state"_a);
  module.def("state_bytes", [](const SearchCosts& costs, std::pair<int, int> run, int replicas) {
    return costs.runs.held({run.first, run.second}, replicas);
  }, "costs"_a, "run"_a, "replicas"_a);
  module.def("rows_of", rows_of, "costs"_a, "devices"_a, "size"_a);
  module.def("load_s", load_s, "costs"_a, "rules"_a, "point"_a, "question"_a);
  module.def("random_walk", random_walk, "costs"_a, "rules"_a, "start"_a, "question"_a, "heat"_a,
             "steps"_a, "seed"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace penstock
