// The planned order of messages, as `penstock.schedule.message_order` defines it.
#include <algorithm>
#include <compare>
#include <stdexcept>

#include "play.hpp"

namespace penstock {

/// Starts of the actions of the first iteration that send messages, if all actions last one unit
/// and each starts as soon as it can; -1 if it never does. By instance and direction (backwards
/// first), then by micro-batch.
std::vector<std::vector<int>> Play::unit_times() const {
  const int lists = 2 * static_cast<int>(parts_.stages.size()), groups = orders_.group_count();
  std::vector<std::pair<int, int>> connected;
  for (const auto& [producer, consumer, boundary] : parts_.connections) {
    connected.emplace_back(2 * producer, 2 * consumer);
    connected.emplace_back(2 * consumer + 1, 2 * producer + 1);
  }
  const Lists senders(lists, connected);
  const int each = orders_.micro_batches / orders_.iterations;
  std::vector<std::vector<int>> times(lists, std::vector<int>(each, -1));
  std::vector<std::int64_t> next(orders_.start.begin(), orders_.start.end() - 1);
  std::vector<int> free(groups);

  // Count the next action of a group as done if it has all that it needs; return whether it had.
  const auto proceeds = [&](int group) {
    if (next[group] == orders_.start[group + 1]) return false;
    const Action action = orders_.actions[next[group]];
    const int m = action.number();
    if (m >= each) return false;
    int& start = free[group];
    if (action.kind() <= Kind::backward_input) {
      const int list = 2 * action.instance() + (action.kind() == Kind::forward);
      for (const int sender : senders[list]) {
        if (!works(sender / 2, m)) continue;
        if (times[sender][m] < 0) return false;
        start = std::max(start, times[sender][m] + 1);
      }
      times[list][m] = start;
    }
    if (action.kind() != Kind::step) ++start;
    ++next[group];
    return true;
  };
  for (bool any = true; any;) {
    any = false;
    for (int group = 0; group < groups; ++group)
      while (proceeds(group)) any = true;
  }
  return times;
}

/// Set the lanes that each device turns to, message after message.
void Play::make_turns() {
  struct Planned {
    int iteration, time, device, lane;
    auto operator<=>(const Planned&) const = default;
  };
  if (streams_each_ == 2)
    throw std::invalid_argument("forwards beside backwards have no planned order of messages");
  const std::vector<std::vector<int>> times = unit_times();
  const int each = orders_.micro_batches / orders_.iterations;
  std::vector<int> numbers(devices_.size());
  for (const Replica& replica : replicas_) numbers[replica.device] = replica.work->device;
  std::vector<Planned> planned;
  for (int lane = 0; lane < static_cast<int>(messages_.size()); ++lane) {
    const Message& message = messages_[lane];
    if (message.seconds == 0) continue;
    for (int m = 0; m < orders_.micro_batches; ++m) {
      const int time = times[2 * message.from + message.forward][m % each];
      if (time >= 0 && works(message.to, m))
        planned.push_back({m / each, time, numbers[message.sender], lane});
    }
  }
  std::ranges::sort(planned);
  std::vector<std::pair<int, int>> turns;
  for (const Planned& next : planned) {
    turns.emplace_back(messages_[next.lane].sender, next.lane);
    turns.emplace_back(receiving_device(messages_[next.lane]), next.lane);
  }
  turns_ = Lists(static_cast<int>(devices_.size()), turns);
}

}  // namespace penstock
