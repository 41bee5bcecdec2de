// A quick simulation of a point, which ranks candidates before few of them are simulated exactly.
//
// Costs of stages, messages and what they occupy are those of `play.hpp`, but
//
//   - all replicas of a group work in lockstep, as long as the slowest takes;
//   - the order of work is not a schedule's but made by a rule. *Strict*, with one stage a group and
//     fused backwards: forwards up to the depth, then a backward and a forward in turn, exactly
//     'early-backward'. Otherwise *greedy*: the oldest backward that is ready, else a forward as far
//     as memory and depth allow, else a weight gradient;
//   - of many micro-batches only some are simulated. The others take the period of the last ones;
//   - hosts with few cores count only in the bound, and a mirrored point as a straight one whose
//     groups have the mean work, and the memory, of both of their stages.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "stage_costs.hpp"
#include "walk.hpp"

namespace penstock {

class QuickPlay {
 public:
  /// `costs` are those of each sharding, without and with recompute by block: null where not
  /// allowed.
  QuickPlay(std::vector<const SearchCosts*> costs, PointRules rules);

  const PointRules rules;
  /// Simulated actions so far; the parts of points that are only bounded count, too.
  std::int64_t spent = 0;
  bool simulates_all = false;  // all micro-batches, however many

  /// Seconds of a point; a bound alone where that is above `limit_s`, infinite if it does not fit.
  double seconds(const Point& point, double limit_s);
  /// The micro-batches in flight of each stage of the last point.
  const std::vector<int>& depths() const { return depth_; }

  /// Cut the layers so that stages take about equally long.
  void even_cuts(Point& point) const;
  /// The quickest of a point with every recompute, sharding and depth, equal for all groups or
  /// where memory is short.
  Found best_variant(const Point& point, double limit_s);
  /// The quickest points one move away, at most `most`, that take less than `limit_s`.
  std::vector<Found> neighbours(const Point& point, double limit_s, int most);

 private:
  /// Two stages that exchange messages: their bytes, number of tensors, and messages.
  struct Pair {
    int from, to;
    bool returns;  // gradients go back
    std::array<Affine, 2> bytes = {};
    std::array<int, 2> tensors = {};
    std::array<double, 2> seconds = {};       // of the longest message
    std::array<std::pair<int, int>, 2> messages = {};  // the first, and the one after the last
  };
  /// The engines and ports that a message occupies, filled up with `nothing()`.
  using Uses = std::array<int, 4>;
  /// Message of one device to another for each micro-batch, and the micro-batches that wait.
  struct Message {
    int stage;  // that waits for it
    bool forward;
    double seconds;
    Uses uses;
    int sent = 0, offered = 0;
    double ended_s = 0;
    std::vector<double> ready_s = {};  // when each micro-batch could be sent
  };
  struct Waiting {
    double ready_s;
    int number;  // of the message
    Uses uses;
  };
  enum Action { kForward, kBackward, kWeight, kNothing };
  struct Group {
    std::vector<int> stages = {};
    double room = 0, used = 0;    // bytes for what its stages save
    double left_s = 0;            // work that is still to start
    double done_s = 0;            // the end of the running action
    int running = -1;             // a stage
    Action action = kNothing;
  };
  struct Progress {
    int forwards = 0, backwards = 0, weights = 0;
    double ended_s = 0;
  };

  const SearchCosts& costs() const { return *costs_[0]; }
  int host_at(int place) const { return costs().devices[point_->order[place]].host; }
  int nothing() const { return 2 * static_cast<int>(point_->order.size() + costs().hosts.size()); }
  int width_of(int group) const { return point_->starts[group + 1] - point_->starts[group]; }
  Places places_of(int group) const { return {point_->starts[group], point_->starts[group + 1]}; }
  std::span<const int> devices_of(int group) const {
    return std::span(point_->order).subspan(point_->starts[group], width_of(group));
  }
  std::span<int> rows_of(int group) {
    return std::span(rows_).subspan(point_->starts[group], width_of(group));
  }
  bool recomputes(int group) const { return point_->recompute[group] == kStage; }
  double bytes_kept(int stage) const {
    return recomputes(group_[stage]) ? cost_[stage].inputs : cost_[stage].saved;
  }
  double work_s(int stage) const;
  bool is_strict() const { return rules.has_one_stage_each() && !rules.split; }
  bool set_costs();
  const StageCost& cost_of(int group, Run run);
  void mirror_costs();
  void connect();
  void add_messages(Pair& pair, int way);
  bool set_depths();
  int wish(int stage) const;
  bool is_short(int group) const;
  double bound_s();

  double play(double limit_s);
  void wake(int source, double time_s);
  void choose(int group, double now_s);
  std::pair<Action, int> next_of(int group, double now_s, double& soonest_s) const;
  bool is_ready(bool forward, int stage, double now_s, double& soonest_s) const;
  void end_action(int group, double now_s);
  void send(const Pair& pair, int micro_batch, int way, double now_s, double blocked_s = 0);
  double blocked_s(int stage, double now_s) const;
  void wait(int number);
  bool can_start(const Uses& uses) const;
  void start_message(int number, double now_s);
  void end_message(int number, double now_s);
  void arrive(int stage, int micro_batch, bool forward, double at_s);
  double end_s() const;

  void save_where_short(Point& point, int recompute);

  const std::vector<const SearchCosts*> costs_;
  std::vector<StageCosts> stage_costs_;
  std::unordered_map<std::uint64_t, StageCost> known_;

  // The point.
  const Point* point_ = nullptr;
  int size_ = 1, all_ = 1, count_ = 1;  // micro-batch; micro-batches; those that are simulated
  std::vector<int> group_, depth_, stage_of_layer_, rows_;
  std::vector<StageCost> cost_;
  std::vector<Pair> pairs_;
  std::vector<Message> messages_;
  std::vector<std::vector<int>> out_, in_;  // pairs of each stage

  // The play. Inputs are those of forwards and backwards: when they come, and how many are missing.
  std::vector<Group> groups_;
  std::vector<Progress> progress_;
  std::array<std::vector<double>, 2> at_s_;
  std::array<std::vector<int>, 2> missing_;
  std::vector<char> busy_;
  std::vector<Waiting> waiting_;  // in the order in which they were ready
  std::vector<double> drained_s_;  // when the first stage ends each backward
  std::vector<std::pair<double, int>> events_;
  int filling_ = 1;  // micro-batches until the pipeline is full
  double period_s_ = 0;  // of a micro-batch on the fullest resource
  double give_up_s_ = kInfinity;
  bool gave_up_ = false;
};

}  // namespace penstock
