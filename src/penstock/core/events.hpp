#pragma once

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

namespace penstock {

/// The next event of every source, as a tournament: each inner node holds the earliest time of its
/// eight children, which share a cache line. Of equal times the source with the lowest number wins.
class Events {
 public:
  explicit Events(int sources) {
    int leaves = 1;
    for (first_leaf_ = kRoot; leaves < sources; leaves *= 8) first_leaf_ += leaves;
    time_s_.assign(first_leaf_ + leaves, std::numeric_limits<double>::infinity());
  }

  bool empty() const { return next_s() == std::numeric_limits<double>::infinity(); }
  double next_s() const { return time_s_[kRoot]; }
  double of(int source) const { return time_s_[first_leaf_ + source]; }

  /// Set the next event of `source`, instead of any earlier setting.
  void set(int source, double time_s) {
    int node = first_leaf_ + source;
    double before_s = std::exchange(time_s_[node], time_s);
    if (source == acting_) return;  // `finish` updates the nodes above it.
    while (node > kRoot) {
      node = parent(node);
      const double above_s = time_s_[node];
      if (time_s < above_s) {
        time_s_[node] = time_s;
      } else if (before_s == above_s) {
        time_s_[node] = time_s = earliest_child_s(node);
      } else {
        return;
      }
      before_s = above_s;
    }
  }

  /// Take the source of the next event. Until `finish`, the nodes above it keep its old time:
  /// times that are set meanwhile do not pass these nodes, so one update corrects all.
  int take() {
    const double time_s = next_s();
    int node = kRoot;
    while (node < first_leaf_) {
      const int first = first_child(node);
      int chosen = 7;
      for (int k = 6; k >= 0; --k) chosen = time_s_[first + k] == time_s ? k : chosen;
      node = first + chosen;
    }
    time_s_[node] = std::numeric_limits<double>::infinity();
    return acting_ = node - first_leaf_;
  }

  void finish() {
    for (int node = first_leaf_ + acting_; node > kRoot;) {
      node = parent(node);
      time_s_[node] = earliest_child_s(node);
    }
    acting_ = -1;
  }

 private:
  static constexpr int kRoot = 7;  // so that the children of every node start at a multiple of 8
  static int parent(int node) { return (node >> 3) + 6; }
  static int first_child(int node) { return 8 * (node - 6); }

  double earliest_child_s(int node) const {
    const double* t = &time_s_[first_child(node)];
    return std::min(std::min(std::min(t[0], t[1]), std::min(t[2], t[3])),
                    std::min(std::min(t[4], t[5]), std::min(t[6], t[7])));
  }

  std::vector<double> time_s_;
  int first_leaf_ = kRoot, acting_ = -1;
};

}  // namespace penstock
