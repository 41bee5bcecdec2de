// Transfers between groups of devices that are known before.
#pragma once

#include <utility>
#include <vector>

#include "layers.hpp"

namespace penstock {

/// The devices of a cluster, and those of each group with their rows.
struct Network {
  const Hardware& hardware;
  std::vector<std::vector<std::pair<int, int>>> groups;
};

/// The load of an engine or a port by the messages of a transfer: seconds of latency, and seconds
/// for each byte that does not depend on rows, and for each byte of a row.
struct MessageLoad {
  double latency_s = 0, s_per_byte = 0, s_per_row_byte = 0;

  double seconds(Affine bytes) const {
    return latency_s + s_per_byte * bytes.fixed + s_per_row_byte * bytes.each;
  }
  /// Return whether no term is less than that of another load.
  bool outweighs(const MessageLoad& other) const {
    return latency_s >= other.latency_s && s_per_byte >= other.s_per_byte &&
           s_per_row_byte >= other.s_per_row_byte;
  }
};

/// Computes the transfers between groups.
class Transfers {
 public:
  explicit Transfers(const Network& network)
      : groups_(network.groups), hardware_(network.hardware),
        busy_(2 * (hardware_.devices.size() + hardware_.hosts.size())) {}

  /// The loads of the busiest resources of a transfer, whose messages are those of
  /// `penstock.costs.stage_costs.split_concat_s`.
  void loads(int sender, int receiver, std::vector<MessageLoad>& found);

  /// Seconds of a transfer of `bytes`.
  static double seconds(const std::vector<MessageLoad>& loads, Affine bytes);

 private:
  void add_message(int resource, std::size_t link, int rows);
  void keep(const MessageLoad& load, std::vector<MessageLoad>& found) const;
  int engine_out(int device) const { return device; }
  int engine_in(int device) const { return devices() + device; }
  int port_out(int device) const { return 2 * devices() + hardware_.devices[device].host; }
  int port_in(int device) const {
    return port_out(device) + static_cast<int>(hardware_.hosts.size());
  }
  int devices() const { return static_cast<int>(hardware_.devices.size()); }

  const std::vector<std::vector<std::pair<int, int>>>& groups_;
  const Hardware& hardware_;
  std::vector<MessageLoad> busy_;
};

}  // namespace penstock
