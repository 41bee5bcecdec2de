#pragma once

#include <span>
#include <utility>
#include <vector>

namespace penstock {

/// Lists of numbers, one after the other in one array.
class Lists {
 public:
  Lists() = default;

  /// The second number of each pair, in the list that the first one says.
  Lists(int lists, std::span<const std::pair<int, int>> pairs)
      : start_(lists + 1), items_(pairs.size()) {
    for (const auto& [list, item] : pairs) ++start_[list + 1];
    for (int k = 0; k < lists; ++k) start_[k + 1] += start_[k];
    std::vector<int> next(start_.begin(), start_.end() - 1);
    for (const auto& [list, item] : pairs) items_[next[list]++] = item;
  }

  void add(int item) { items_.push_back(item); }
  void end_list() { start_.push_back(static_cast<int>(items_.size())); }

  int size() const { return static_cast<int>(start_.size()) - 1; }
  std::span<const int> operator[](int list) const {
    return {items_.data() + start_[list], items_.data() + start_[list + 1]};
  }

  /// The lists that contain each of `count` numbers.
  Lists inverse(int count) const {
    std::vector<std::pair<int, int>> pairs;
    pairs.reserve(items_.size());
    for (int list = 0; list < size(); ++list)
      for (const int item : (*this)[list]) pairs.emplace_back(item, list);
    return {count, pairs};
  }

 private:
  std::vector<int> start_ = {0}, items_;
};

}  // namespace penstock
