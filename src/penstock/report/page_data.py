"""What the scripts of the report page draw: timelines, memory, and curves over the steps."""

from collections.abc import Sequence

from penstock.document import Json
from penstock.report.device_rows import gantt_rows
from penstock.report.record import RunRecord
from penstock.report.timelines_html import TimelinePanel
from penstock.words import seconds_text

__all__ = ["chart_data", "timeline_panels"]


def timeline_panels(record: RunRecord) -> Sequence[TimelinePanel]:
    """The predicted timeline with its memory, and below it the measured one."""
    limits = [device.memory_bytes for device in record.cluster.devices]
    panels: list[TimelinePanel] = []
    for title, note, timeline in (
        ("Predicted", "simulated before the run", record.predicted),
        ("Measured", "a step of about the median time", record.measured),
    ):
        chart = gantt_rows(timeline, limits)
        panels.append(TimelinePanel(chart, f"{title}: {seconds_text(chart.end_s)}", note))
    return panels


def chart_data(record: RunRecord) -> dict[str, Json]:
    """The measured peaks of the devices, their memory limits where drawn, and the curves."""
    return {
        "devices": [
            {
                "device": device,
                "limit_bytes": record.near_limits.get(device, 0.0),
                "measured_peak_bytes": record.measured_peaks.get(device, 0.0),
            }
            for device in record.plan.ranks
        ],
        "training": [[row.step, row.loss] for row in record.steps],
        "evaluations": [[row.step, row.evaluation_loss] for row in record.evaluations],
        "samples_per_s": [[row.step, row.samples_per_s] for row in record.steps],
    }
