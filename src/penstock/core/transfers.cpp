#include "transfers.hpp"

namespace penstock {

void Transfers::add_message(int resource, std::size_t link, int rows) {
  const double s_per_byte = 1 / hardware_.links.bytes_per_s[link];
  busy_[resource].latency_s += hardware_.links.latency_s[link];
  busy_[resource].s_per_byte += s_per_byte;
  busy_[resource].s_per_row_byte += s_per_byte * rows;
}

void Transfers::loads(int sender, int receiver, std::vector<MessageLoad>& found) {
  const auto &from = groups_[sender], &to = groups_[receiver];
  for (const auto& [device, rows] : from)
    busy_[engine_out(device)] = busy_[port_out(device)] = {};
  for (const auto& [device, rows] : to) busy_[engine_in(device)] = busy_[port_in(device)] = {};
  int row = 0, have = from[0].second, need = to[0].second;
  for (std::size_t i = 0, j = 0; i < from.size() && j < to.size();) {
    const int end = std::min(have, need), a = from[i].first, b = to[j].first;
    if (end > row && a != b) {
      const std::size_t link = hardware_.links.of(a, b);
      add_message(engine_out(a), link, end - row);
      add_message(engine_in(b), link, end - row);
      if (hardware_.links.uses_port[link]) {
        add_message(port_out(a), link, end - row);
        add_message(port_in(b), link, end - row);
      }
    }
    row = end;
    if (have == end && ++i < from.size()) have += from[i].second;
    if (need == end && ++j < to.size()) need += to[j].second;
  }
  found.clear();
  for (const auto& [device, rows] : from) {
    keep(busy_[engine_out(device)], found);
    keep(busy_[port_out(device)], found);
  }
  for (const auto& [device, rows] : to) {
    keep(busy_[engine_in(device)], found);
    keep(busy_[port_in(device)], found);
  }
}

/// Keep a load unless another one outweighs it. Of more than the most, the last ones are merged.
void Transfers::keep(const MessageLoad& load, std::vector<MessageLoad>& found) const {
  constexpr std::size_t kMost = 8;
  const auto outweighs = [&](const MessageLoad& other) { return other.outweighs(load); };
  if (std::ranges::any_of(found, outweighs)) return;
  std::erase_if(found, [&](const MessageLoad& other) { return load.outweighs(other); });
  if (found.size() < kMost) {
    found.push_back(load);
    return;
  }
  MessageLoad& last = found.back();
  last = {std::max(last.latency_s, load.latency_s), std::max(last.s_per_byte, load.s_per_byte),
          std::max(last.s_per_row_byte, load.s_per_row_byte)};
}

double Transfers::seconds(const std::vector<MessageLoad>& loads, Affine bytes) {
  double longest_s = 0;
  if (bytes.fixed + bytes.each > 0)
    for (const MessageLoad& load : loads) longest_s = std::max(longest_s, load.seconds(bytes));
  return longest_s;
}

}  // namespace penstock
