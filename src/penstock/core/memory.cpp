// The peak of memory on each device, which depends only on the order of work, not on its times.
#include <algorithm>

#include "work.hpp"

namespace penstock {

double most_bytes(const std::vector<StageMemory>& memories, const std::vector<Holding>& holdings) {
  double most = 0;
  for (const Holding& holding : holdings) {
    double bytes = memories.at(holding.running).workspace_bytes;
    for (std::size_t k = 0; k < memories.size(); ++k)
      bytes += memories[k].at(holding.held.at(k).first, holding.held[k].second);
    most = std::max(most, bytes);
  }
  return most;
}

bool fits(const Parts& parts, const Orders& orders) {
  std::vector<std::vector<const StageWork*>> groups(orders.group_count());
  for (std::size_t i = 0; i < parts.stages.size(); ++i)
    groups[orders.groups[i]].push_back(parts.stages[i]);
  std::vector<StageMemory> memories, last;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    last.clear();
    double bytes = 0;
    for (std::size_t r = 0; r < groups[g].front()->replicas.size(); ++r) {
      memories.clear();
      for (const StageWork* stage : groups[g]) memories.push_back(stage->replicas[r].memory);
      if (memories != last) bytes = most_bytes(memories, orders.held.at(g));  // mostly all equal
      last = memories;
      if (bytes > groups[g].front()->replicas[r].device_bytes) return false;
    }
  }
  return true;
}

}  // namespace penstock
