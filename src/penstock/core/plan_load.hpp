// The load of a plan: its seconds if work never waited for a busy resource.
//
// A plan takes at least as long as its most loaded device, engine or port is busy, between the
// first forward that reaches it and the last backward that leaves it. That is quickly computed for
// any number of micro-batches. The simulator says how much longer the plan takes.
//
// There are two loads. The first lets every stage work on its own. Orders that are searched for
// come near to it. The second is *steady*: all stages keep the pace of the most loaded resource, as
// they do with one forward and one backward in turn. So no stage is done before the last
// micro-batches, and all all-reduces come at the end.
#pragma once

#include <vector>

#include "point.hpp"
#include "stage_costs.hpp"

namespace penstock {

enum class RecomputeMode { never, where_faster, always };

/// Parameters of a load: steady or not; and its power, a whole number.
///
/// The load is a norm of that power of all resources' loads, or their maximum where it is 0. It is
/// scaled so that three equal loads, those of a stage alone, are worth one of them. More that are
/// equal are worth more: a plan whose resources are all full is slower than its fullest one alone.
struct LoadQuestion {
  RecomputeMode recompute;
  int power;
  bool steady;
};

/// The loads of plans, one after the other. Stages that a plan has in common with the one that was
/// kept last are not costed again.
class PlanLoad {
 public:
  PlanLoad(const SearchCosts& costs, const PointRules& rules, LoadQuestion question)
      : costs_(costs), rules_(rules), question_(question), stage_costs_(costs, rules.split) {}

  /// Seconds of the most loaded resource of a point, or a norm of all.
  ///
  /// A steady load also has the way of one micro-batch, and what is left of the latest all-reduce.
  /// Passing a micro-batch back takes twice as long then, because messages wait for one another.
  /// The load is infinite where a stage does not fit or has more replicas than rows.
  double seconds(const Point& point);

  /// Later plans are compared with the one whose load was computed last.
  void keep() { std::swap(kept_, now_); }

 private:
  struct Stage {
    int group, first, last;  // places in the order of devices
    Run run;
    StageCost cost = {};
    double down_s = 0, up_s = 0;  // messages to the next stage, and back
    double below_s = 0;           // the way of a micro-batch from here to the end and back
  };

  /// The stages of a plan. `rows` and `ports` are by place; the latter says at the first device of
  /// a stage on each host which ports of the host the all-reduce uses.
  struct Plan {
    std::vector<Stage> stages;
    std::vector<int> order, rows, ports;
    int size = 0;
  };

  /// Seconds that an engine or a port is busy with one micro-batch.
  struct Sides {
    double sent_s = 0, received_s = 0;
  };

  /// The way of micro-batches up to a stage.
  struct Way {
    double first_s = 0;  // until the first forward begins
    double after_s = 0;  // all-reduces of earlier stages, after their last message
    double drain_s = 0;  // of one micro-batch back to the front
    double late_s = 0;   // what is left of the latest all-reduce of a steady plan
  };

  static constexpr int kSends = 1, kReceives = 2;

  int micro_batches() const { return rules_.batch / now_.size; }
  void cost_stages();
  bool copy_from_kept(int number);
  void set_ports(const Stage& stage);
  void carry_tensors(const std::vector<int>& cuts);
  double carry(Affine bytes, const Stage& from, const Stage& to);
  double busy_s(const Stage& stage) const;
  double busy_with_several_s(int group) const;
  void add_stage_loads(int number, Way& way);
  void add_port_loads(double late_s);
  double norm_s() const;

  const SearchCosts& costs_;
  const PointRules& rules_;
  const LoadQuestion question_;
  StageCosts stage_costs_;
  Plan now_, kept_;
  std::vector<int> stage_of_layer_;
  std::vector<Sides> engines_, ports_, reduced_;  // by place; by host; by host, for all-reduces
  std::vector<double> loads_;
};

}  // namespace penstock
