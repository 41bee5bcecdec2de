// Makes an order event by event: a free device group takes the action that a policy ranks first.
//
// No policy can deadlock. A *place* is a stage for one direction of micro-batches, and takes its
// micro-batches in order. So only older micro-batches and memory can hold a micro-batch up. A
// forward is refused unless the group could still finish all micro-batches one after the other,
// oldest first (the banker's algorithm):
//
//     for every micro-batch k with a forward left on this group,
//         what k and younger ones hold here + what k has yet to save here <= memory,
//
// where micro-batches that only wait for W do not count, because W can run at once.
//
// Invariant: this always holds. It holds at the start, because one micro-batch fits. A forward of m
// on place q changes no sum for k >= m (what it saves was still to be saved), and `leaves_room`
// checks the sums for k < m. Between two places of the group the sum is largest for the oldest k,
// so one check for each place is enough. Backwards only reduce the sums.
//
// Progress: take the oldest unfinished micro-batch k. Older ones hold nothing but what waits for W.
// The places of k have served all older ones, so its next action is the next one of its place. If
// it is a forward, it fits by the invariant once the group's W have run, and a group whose only
// candidate does not fit runs a W. In-flight limits are at least one, so they do not stop k either.
// So some group can always proceed. A group that waits by choice waits for a message whose arrival
// time is known.
#pragma once

#include <cstdint>
#include <vector>

#include "events.hpp"
#include "lists.hpp"

namespace penstock {

/// Rows of seconds and keys: backward is I, or B if backwards are whole.
enum ListRow { kForward, kBackward, kWeights };

struct Place {
  int group, direction, micro_batches;
  int limit;                         // micro-batches between a forward and its W
  double seconds[3];                 // by row
  double recompute_s, transfer_s;    // of its forward again; to the next place or back
  double saved_bytes, kept_bytes;    // of a micro-batch from its forward on, and between I and W
};

/// A pipeline: stage s of direction w is place `w * stages + s`. A place has at most `indices`
/// micro-batches. An action is coded as `(row * places + place) * indices + index`.
struct ListPipe {
  int stages, directions, indices;
  bool is_split;
  std::vector<Place> places;
  Lists members;  // by group: its places
  std::vector<double> limit_bytes, work_s;
  std::vector<std::int64_t> order_starts;  // by group: where its actions begin in an order

  std::int64_t action(int row, int place, int index) const {
    return (static_cast<std::int64_t>(row) * places.size() + place) * indices + index;
  }
  /// Micro-batches are numbered through both directions.
  int micro_batch(int place, int index) const {
    return index * directions + places[place].direction;
  }
};

/// A policy applied to a pipeline (`penstock.schedule.searched.list_search.Policy`).
struct Wishes {
  const double* keys;         // by action; the least goes first
  const std::int64_t* depth;  // by place: the most micro-batches between forward and backward
  double idle_price, overlap, most_pending, weight_overlap, forward_delay_s, lead_s;
};

class ListPlay {
 public:
  ListPlay(const ListPipe& pipe, const Wishes& wishes, std::int64_t* order);

  /// Write the order, group after group; returns the makespan, or infinity as soon as that is
  /// certain to be `best_s` or longer.
  double run(double best_s);

 private:
  struct Next {
    int row = kForward, place = -1;
    double at_s = kNever;
  };
  /// The action with the least key, and whether a W must first free memory for it; that with the
  /// least key among those that can start now; the next arrival to wait for.
  struct Choice {
    Next wanted, ready;
    bool is_full = false;
    double arrival_s = kNever;
  };
  struct PlaceState {
    int done[3] = {0, 0, 0};  // by row
  };
  struct GroupState {
    double used_bytes, left_s, free_s;  // work left; the end of the last action
    int pending = 0;                    // W
    std::int64_t next = 0;              // in the order
  };
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  Next decide(int group, double now_s) const;
  Choice choose(int group, double now_s) const;
  bool leaves_room(int place) const;
  int next_weights(int group) const;
  double seconds_of(const Next& taken, int index) const;
  void account(const Next& taken);
  int send_on(const Next& taken, int index, double free_s);
  double key(int row, int place, int index) const {
    return wishes_.keys[pipe_.action(row, place, index)];
  }

  const ListPipe& pipe_;
  const Wishes& wishes_;
  std::int64_t* const order_;
  std::vector<PlaceState> places_;
  std::vector<GroupState> groups_;
  std::vector<double> arrival_s_;  // by action (no row for W): when what it needs is there
  Events wake_;
};

}  // namespace penstock
