"""The data of the report page as JSON values, for the script that draws them."""

from penstock.document import Json
from penstock.report.device_stages import stage_names, stages_by_device
from penstock.report.record import RunRecord
from penstock.timeline.metrics import iteration_s
from penstock.timeline.timeline import Timeline
from penstock.words import seconds_text

__all__ = ["page_figures"]


def page_figures(record: RunRecord) -> dict[str, Json]:
    """What the page's script draws: timelines, devices with their memory, and curves."""
    return {
        "timelines": [
            timeline_figure("predicted", "Predicted", "simulated before the run", record.predicted),
            timeline_figure(
                "measured", "Measured", "a step that took about the median time", record.measured
            ),
        ],
        "devices": [
            device_figure(record, device, stages)
            for device, stages in stages_by_device(record.plan).items()
        ],
        "training": [[row.step, row.loss] for row in record.steps],
        "evaluations": [[row.step, row.evaluation_loss] for row in record.evaluations],
        "samples_per_s": [[row.step, row.samples_per_s] for row in record.steps],
    }


def timeline_figure(key: str, title: str, note: str, timeline: Timeline) -> dict[str, Json]:
    """One timeline; an event is a list, to keep the page small."""
    end_s = iteration_s(timeline)
    return {
        "key": key,
        "title": f"{title}: {seconds_text(end_s)}",
        "note": note,
        "end_s": end_s,
        "events": [
            [e.device, e.kind, e.stage, e.micro_batch, e.start_s, e.end_s, e.peer, e.bytes]
            for e in timeline.events
        ],
    }


def device_figure(record: RunRecord, device: int, stages: tuple[int, ...]) -> dict[str, Json]:
    """One device: its stages, and its predicted, measured and available memory."""
    return {
        "device": device,
        "stages": [*stages],
        "stage_names": stage_names(stages),
        "limit_bytes": record.cluster.devices[device].memory_bytes,
        "measured_peak_bytes": record.measured_peaks.get(device, 0.0),
        "predicted": [
            [sample.time_s, sample.bytes]
            for sample in record.predicted.memory
            if sample.device == device
        ],
    }
