// The work of the parts of plans, as the simulator plays it: stages, messages, tied parameters.
#pragma once

#include <vector>

#include "layers.hpp"

namespace penstock {

/// An instance of a stage on its devices, and how a schedule uses it
/// (`penstock.simulate.instances.StageUse`). `earlier` are the stages of its home before it, which
/// receive tensors for it.
struct StageQuestion {
  Run run;
  std::vector<Run> earlier;
  std::vector<int> devices, rows;
  Sharding sharding;
  bool split;
  int versions;
  bool reduces;
  int predictions;
  std::vector<ReduceCost> all_reduces;
};

/// A profile on a cluster. `state` are the optimizer's bytes for each byte of parameters.
class PartCosts {
 public:
  PartCosts(const Layers& layers, const Hardware& hardware, double state)
      : layers_(layers), hardware_(hardware), state_(state) {}

  StageWork stage(const StageQuestion& question) const;

  /// The messages between two stages for each micro-batch.
  ///
  /// The stage that makes a tensor sends it to the first stage of each home that reads it, once; the
  /// others have it there. Each replica sends each replica the rows that both hold. A tensor
  /// without rows is sent whole; receiver j
  /// gets it from sender j modulo the number of senders. The tensors of one pair and direction are
  /// one message, in which each tensor has its own latency. Neighbouring stages depend on each other
  /// even if they exchange no tensor (`penstock.schedule.action`); that message takes no time.
  /// Neither does a message within a device that holds both stages.
  Boundary boundary(const StageWork& producer, const StageWork& consumer) const;

  /// Parameters of these sizes, summed over all devices of some instances.
  TiedGroup tie(std::vector<int> instances, const std::vector<double>& sizes,
                const std::vector<int>& devices, std::vector<ReduceCost> all_reduces) const;

  /// All (producer, consumer) stages between which messages pass: neighbours, and those of two
  /// homes that a tensor skips a stage between.
  std::vector<std::pair<int, int>> connected(const std::vector<int>& cuts,
                                             const std::vector<int>& homes) const;

  /// Bytes of the parameters that only the layers of a stage use.
  double whole_bytes(const StageWork& stage) const {
    return layers_.whole_bytes(stage.run);
  }

 private:
  Ports ports_of(const std::vector<int>& devices) const;

  const Layers layers_;
  const Hardware hardware_;
  const double state_;
};

/// The same work where all gradients wait for the end of the last backward.
StageWork summed_last(StageWork work);

}  // namespace penstock
