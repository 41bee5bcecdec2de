// Orders of a pipeline whose transfers never wait for one another.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace penstock {

/// Kinds of actions, as `penstock.schedule.action` codes them.
enum class Pass { forward, whole, input, weight, again };

/// The costs of a pipeline. An action is coded as `(kind * stages + stage) * micro_batches +
/// micro-batch`; without its kind, it is a cell.
struct IdealPipe {
  int stages, micro_batches;
  std::vector<double> seconds;     // by kind and stage
  std::vector<double> transfer_s;  // from every stage but the last to the next, or back

  int cells() const { return stages * micro_batches; }
  Pass kind(std::int64_t action) const { return static_cast<Pass>(action / cells()); }
  int cell(std::int64_t action) const { return static_cast<int>(action % cells()); }
  int stage(int cell) const { return cell / micro_batches; }
  std::int64_t action(Pass kind, int cell) const {
    return static_cast<std::int64_t>(kind) * cells() + cell;
  }
  double seconds_of(Pass kind, int cell) const {
    return seconds[static_cast<int>(kind) * stages + stage(cell)];
  }
};

/// Limits of the groups of a pipeline: `most` micro-batches until their W, over all stages of a
/// group; `in_flight[s]` of stage `s`; `memory[g]` bytes. `saved[s]` and `kept[s]` are the bytes of
/// a micro-batch from F on, and between I and W.
struct HeldLimits {
  int most;
  std::vector<int> group, in_flight;  // of each stage
  std::vector<double> saved, kept, memory;
};

using Codes = std::span<const std::int64_t>;

/// Write the start of every action that can be played, each as early as its order and what it needs
/// allow; returns where each order stops. Order k is `actions[first[k]] .. [first[k + 1] - 1]`.
std::vector<int> play_orders(const IdealPipe& pipe, const std::vector<int>& first, Codes actions,
                             double* start_s);

/// Play fixed orders of F and I, insert W where they delay nothing, and return the makespan.
///
/// The order of a group with its W is written to `out` from `3 * first[g] / 2` on. A group runs its
/// oldest pending W in two cases: while it waits, if the W ends before the wait does (within
/// `slack_s`); and when a forward would exceed a limit. The result is infinite if an order exceeds
/// a limit even with every W run at once, or if it deadlocks.
double fill_gaps(const IdealPipe& pipe, const HeldLimits& limits, const std::vector<int>& first,
                 Codes actions, double slack_s, std::int64_t* out);

/// Rearrangement of the orders of a V: the ranks of all cells for F and for I; the most
/// micro-batches of each group between F and I on its way down; whether groups are patient.
struct Ranking {
  Codes forward, input;
  std::vector<int> deepest;
  bool patient;
};

/// Write orders of F and I in which a group never waits for one action while another can run.
///
/// Group g of a V holds stages g and 2 p - 1 - g. A free group looks at the next F and the next I
/// of both stages, and starts the one with the least rank among those that can start. It runs a W
/// if that one is a forward beyond a limit (as in `fill_gaps`), or if none can start. If it is
/// patient, it waits where the W would end after an arrival that is already known.
///
/// A stage on the way down has at most `deepest[g]` micro-batches between F and I. This is less
/// than `most`, and bytes are reserved likewise. So the stage on the way up can always run, and the
/// oldest micro-batch can always proceed.
void rearrange(const IdealPipe& pipe, const HeldLimits& limits, const Ranking& ranks,
               double slack_s, std::int64_t* out);

}  // namespace penstock
