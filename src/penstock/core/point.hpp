// A candidate plan of any placement, as numbers that walks and climbs change.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <random>
#include <vector>

namespace penstock {

/// The random numbers of `numpy.random.seed`: a Mersenne Twister.
class Random {
 public:
  explicit Random(std::uint32_t seed) : engine_(seed) {}

  /// At least 0 and below 1.
  double unit() {
    const std::uint32_t high = engine_() >> 5, low = engine_() >> 6;
    return (high * 67108864.0 + low) / 9007199254740992.0;
  }
  bool coin() { return unit() < 0.5; }

  /// At least 0 and below `end`.
  int below(int end) {
    if (end == 1) return 0;
    const std::uint32_t mask = std::bit_ceil(static_cast<std::uint32_t>(end)) - 1;
    std::uint32_t drawn;
    do drawn = engine_() & mask;
    while (drawn >= static_cast<std::uint32_t>(end));
    return static_cast<int>(drawn);
  }

 private:
  std::mt19937 engine_;
};

/// Ways of a group to save memory: activations that it recomputes, state that its devices shard.
enum Recompute { kNone, kStage, kByBlock };
inline constexpr int kShardings = 3;  // nothing, the optimizer's state, parameters too

/// Micro-batches in flight for each stage from here to the end; the last one: no limit.
inline constexpr std::array kDepths = {1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 1e9};

/// Devices, layers and micro-batches, and how the groups save memory.
///
///     cuts    0        c1            c2      layers       layers c1..c2-1 are stage 1
///     starts  0        p1            p2                   group 1 has order[p1] .. order[p2 - 1]
///
/// `order` has all devices; those of no group come last. `size` and `depth` are indices.
/// `limits` are the micro-batches in flight of each stage; empty: by `depth`.
struct Point {
  std::vector<int> order, starts, cuts, recompute, sharding, limits = {};
  int size = 0, depth = 0;

  int groups() const { return static_cast<int>(starts.size()) - 1; }
  int stages() const { return static_cast<int>(cuts.size()) - 1; }
  bool operator==(const Point&) const = default;
};

enum class Style { straight, looped, folded, mirrored };

/// Properties that all points of an arm share, and the choices that they have.
///
/// `rounds` is the number of stages on a group; backwards are `split` or fused. `cut` says of each
/// cut whether it must not (0), may (1) or must (2) be one: the mask of the pins.
struct PointRules {
  Style style;
  int rounds;
  bool split;
  int batch;
  std::vector<int> sizes;
  int least_groups, most_groups, shallowest, deepest;
  std::vector<int> recomputes, shardings;
  std::vector<int> cut;

  int layers() const { return static_cast<int>(cut.size()) - 1; }
  bool has_one_stage_each() const { return rounds == 1; }
  /// The group that holds a stage.
  int group_of(int stage, int groups) const {
    const int round = stage / groups, place = stage % groups;
    return style == Style::folded && round % 2 ? groups - 1 - place : place;
  }
  /// Return whether a point has an allowed number of groups and the cuts that the pins require.
  bool allows(const Point& point) const;
};

/// Random moves of points, one at a time.
class Moves {
 public:
  Moves(const PointRules& rules, Point& point, Random& random)
      : rules_(rules), point_(point), random_(random) {}

  /// Make one move of cuts, devices, groups or the size of micro-batches, or several.
  void make();

 private:
  void move_cut();
  void swap_devices();
  void move_device();
  void join_groups();
  void split_group();

  const PointRules& rules_;
  Point& point_;
  Random& random_;
};

/// Move the device at one place of the order to another; shift those between.
void shift_device(Point& point, int place, int target);
/// Exchange the devices of two neighbouring groups.
void swap_groups(Point& point, int second);
/// Give a device of one group to another; the number of groups represents the unused devices.
void give_device(Point& point, int place, int giver, int taker);
/// Make one group of two neighbours; of the first one's stages with `straight` placement, too.
void join_groups(Point& point, int second, bool straight);
/// Cut the stage of a group, which keeps its first `width` devices, and `taken` unused ones follow.
void split_group(Point& point, int group, int width, int taken, int cut);

}  // namespace penstock
