// DAPPLE's search over (layers planned, occupied devices). The algorithm in words is at
// `penstock.planners.dapple.dapple`.
#pragma once

#include <vector>

#include "transfers.hpp"

namespace penstock {

/// A step from one occupancy to another; see `penstock.planners.dapple.groups.steps_of`.
struct DappleStep {
  int target;
  int group;  // -1 where it takes more devices than a micro-batch has rows
};

struct Occupancy {
  int first_step;     // its steps go on to those of the next occupancy
  int rest_group;     // of the last stage on the devices left
  double speed_left;  // of all devices left
  double idle;        // devices left over those that the last stage uses
};

struct DappleQuestion {
  int micro_batches, size;
  RecomputeChoice recompute;
  int most_stages;
  std::vector<int> depths;      // in flight, by stages from one to the end
  std::vector<double> least_s;  // sums up to each cut of the least seconds of a row in each layer
  std::vector<DappleStep> steps;
  std::vector<Occupancy> places;  // with one more at the end, for `first_step`
};

/// The last step of a prefix: layers up to `end`, from the state at a cut and a place.
struct Taken {
  int cut = -1, place = -1, step = -1, end = -1;
};

struct DapplePlan {
  double seconds;
  std::vector<Taken> steps;  // from the first one on; empty where there is no plan
};

/// Seconds of the stages and transfers of a plan, in turn.
struct Column {
  double forward_s = 0, backward_s = 0;
  double after_s = 0;  // after the last backward

  double both_s() const { return forward_s + backward_s; }
};

/// The stage with the fewest bubbles in the steady phase.
///
/// Stages are compared from the last to the first. A stage becomes the pivot if its own steady phase
/// is longer than that of the pivot so far plus the round trip between the two. Transfers count as
/// stages.
int pivot_of(const Column* columns, int count, int micro_batches);

/// DAPPLE's closed form; `native.pyi` has it.
double latency_s(const Column* columns, int count, int micro_batches);

/// The best plan of at least two stages whose closed form is below `limit_s`.
DapplePlan dapple_plan(const GroupCosts& costs, const Network& network,
                       const DappleQuestion& question, double limit_s);

}  // namespace penstock
