#include "walk.hpp"

#include <algorithm>
#include <cmath>

namespace penstock {
namespace {

constexpr double kCold = 1e-4;  // the share by which slower plans are accepted at the end
constexpr double kAnotherMove = 0.3;  // probability that a move follows before plans are compared

/// A layout with a size of micro-batches, and its random moves.
struct Walker {
  Layout layout;
  int size;  // an index

  /// Make one move, or several.
  void move(Random& random, int sizes) {
    do {
      const double drawn = random.unit();
      if (drawn < 0.35)
        move_cut(random);
      else if (drawn < 0.5)
        swap_devices(random);
      else if (drawn < 0.6)
        swap_stages(random);
      else if (drawn < 0.7)
        move_device(random);
      else if (drawn < 0.8)
        join(random);
      else if (drawn < 0.95)
        split(random);
      else
        size = std::clamp(size + (random.coin() ? 1 : -1), 0, sizes - 1);
    } while (random.unit() < kAnotherMove);
  }

  /// Move one cut by some layers, by few more often than by many.
  void move_cut(Random& random) {
    if (layout.stages == 1) return;
    const int place = 1 + random.below(layout.stages - 1);
    const int step = static_cast<int>(std::pow(2.0, random.unit() * 3.6));
    const int cut = layout.cuts[place] + (random.coin() ? step : -step);
    if (layout.cuts[place - 1] < cut && cut < layout.cuts[place + 1]) layout.cuts[place] = cut;
  }

  /// Swap two devices, wherever they are.
  void swap_devices(Random& random) {
    const int i = random.below(devices()), j = random.below(devices());
    std::swap(layout.order[i], layout.order[j]);
  }

  /// Exchange the devices of two neighbouring stages, perhaps with their numbers of layers.
  void swap_stages(Random& random) {
    if (layout.stages < 2) return;
    const int place = 1 + random.below(layout.stages - 1);
    const auto device = [&](int k) { return layout.order.begin() + layout.starts[k]; };
    std::rotate(device(place - 1), device(place), device(place + 1));
    layout.starts[place] =
        layout.starts[place - 1] + layout.starts[place + 1] - layout.starts[place];
    if (random.coin())
      layout.cuts[place] = layout.cuts[place - 1] + layout.cuts[place + 1] - layout.cuts[place];
  }

  /// Move one device to another stage, to none, or from none.
  void move_device(Random& random) {
    std::vector<int>& starts = layout.starts;
    const int place = random.below(devices()), stages = layout.stages;
    const auto after = std::upper_bound(starts.begin(), starts.begin() + stages + 1, place);
    const int giver = static_cast<int>(after - starts.begin()) - 1;
    const int taker = random.below(stages + 1);
    if (giver == taker || (giver < stages && starts[giver + 1] - starts[giver] < 2)) return;
    if (giver < taker) {
      shift_device(place, taker < stages ? starts[taker + 1] - 1 : devices() - 1);
      for (int s = giver + 1; s <= std::min(taker, stages); ++s) --starts[s];
    } else {
      shift_device(place, starts[taker + 1]);
      for (int s = taker + 1; s <= std::min(giver, stages); ++s) ++starts[s];
    }
  }

  /// Join two neighbouring stages.
  void join(Random& random) {
    if (layout.stages == 1) return;
    for (int s = 1 + random.below(layout.stages - 1); s < layout.stages; ++s) {
      layout.cuts[s] = layout.cuts[s + 1];
      layout.starts[s] = layout.starts[s + 1];
    }
    --layout.stages;
  }

  /// Split a stage in two, between its devices or with a further device.
  void split(Random& random) {
    std::vector<int>&cuts = layout.cuts, &starts = layout.starts;
    const int place = random.below(layout.stages), lo = cuts[place], hi = cuts[place + 1];
    if (hi - lo < 2 || layout.stages + 1 == static_cast<int>(cuts.size())) return;
    const int width = starts[place + 1] - starts[place];
    int taken = 0, given = width;
    if (starts[layout.stages] < devices() && (width < 2 || random.coin())) {
      shift_device(starts[layout.stages], starts[place + 1]);
      taken = 1;
    } else if (width > 1) {
      given = 1 + random.below(width - 1);
    } else {
      return;
    }
    for (int s = layout.stages; s > place; --s) {
      cuts[s + 1] = cuts[s];
      starts[s + 1] = starts[s] + taken;
    }
    cuts[place + 1] = lo + 1 + random.below(hi - lo - 1);
    starts[place + 1] = starts[place] + given;
    ++layout.stages;
  }

  /// Move the device at one place to another; shift those between.
  void shift_device(int place, int target) {
    const auto at = layout.order.begin();
    if (place < target)
      std::rotate(at + place, at + place + 1, at + target + 1);
    else
      std::rotate(at + target, at + place, at + place + 1);
  }

  int devices() const { return static_cast<int>(layout.order.size()); }
};

}  // namespace

std::vector<Found> random_walk(const SearchCosts& costs, const Layout& start,
                               const WalkPlan& walk) {
  const int sizes = static_cast<int>(walk.sizes.size());
  const int most = static_cast<int>(start.cuts.size()) - 1;
  std::vector<Found> found(static_cast<std::size_t>(sizes) * most, {kInfinity, 0, {}});
  const auto keep = [&](const Walker& at, double seconds) {
    Found& best = found[at.size * most + at.layout.stages - 1];
    if (seconds < best.seconds) best = {seconds, walk.sizes[at.size], at.layout};
  };
  Random random(walk.seed);
  PlanLoad load(costs, walk.asked);
  Walker now{start, walk.first}, next = now;
  double now_s = load.seconds(now.layout, walk.sizes[now.size]);
  load.keep();
  keep(now, now_s);
  for (int step = 0; step < walk.steps; ++step) {
    next = now;
    next.move(random, sizes);
    const double seconds = load.seconds(next.layout, walk.sizes[next.size]);
    const double warmth = walk.heat * (1 - static_cast<double>(step) / walk.steps) + kCold;
    const double limit_s = now_s * (1 - warmth * std::log(1 - random.unit()));
    if (!(seconds < kInfinity) || seconds > limit_s) continue;
    std::swap(now, next);
    now_s = seconds;
    load.keep();
    keep(now, now_s);
  }
  std::erase_if(found, [](const Found& one) { return one.seconds == kInfinity; });
  return found;
}

}  // namespace penstock
