// The predicted and the measured timeline, one above the other on one time axis.

const GUTTER = Math.max(118, ...run.devices.map((d) => 64 + 6.6 * d.stage_names.length));
const ROW = { compute: 20, lane: 5, gap: 9 };
const rowHeight = ROW.compute + 2 * ROW.lane + ROW.gap + 2;

const whole = Math.max(...run.timelines.map((t) => t.end_s), 1e-9);
const view = { low: 0, high: whole };

function laneOf(kind) {
  if (COMPUTE.has(kind)) return [0, ROW.compute];
  if (kind === "RECV") return [ROW.compute + ROW.lane + 2, ROW.lane];
  return [ROW.compute + 1, ROW.lane];
}

function drawBar(panel, event, x, top) {
  const [device, kind, stage, microBatch, start, end] = event;
  const [offset, height] = laneOf(kind);
  const row = run.devices.findIndex((d) => d.device === device);
  // Every second stage of a device is paler.
  const pale = run.devices[row].stages.indexOf(stage) % 2 === 1 && microBatch >= 0 ? " pale" : "";
  const left = x(start);
  const width = Math.max(x(end) - left, 0.75);
  const bar = element("rect", {
    class: `bar ${kind}${COMPUTE.has(kind) ? pale : ""}`, x: left, y: top + row * rowHeight + offset,
    width: Math.max(width - (width > 3 ? 0.8 : 0), 0.5), height, rx: width > 6 ? 2 : 0,
    "data-key": `${device}/${kind}/${stage}/${microBatch}`,
  });
  bar.event = event;
  panel.append(bar);
  if (COMPUTE.has(kind) && width > 15) {
    const label = microBatch >= 0 ? `${microBatch}` : width > 34 ? "step" : "";
    panel.append(element("text", {
      class: `label on-${kind}${pale}`, x: left + width / 2, y: top + row * rowHeight + offset + 14,
    }, label));
  }
}

function drawPanel(svg, timeline, top, x, width) {
  const title = element("text", { class: "panel-title", x: 0, y: top + 13 }, timeline.title);
  title.append(element("tspan", { class: "quiet", dx: 8 }, timeline.note));
  svg.append(title);
  const rows = top + 24;
  run.devices.forEach((device, index) => {
    const y = rows + index * rowHeight;
    svg.append(element("rect", {
      class: "row", x: GUTTER, y, width: Math.max(width - GUTTER, 0), height: ROW.compute,
    }));
    const name = element("text", { class: "row-name", x: 0, y: y + 14 }, `device ${device.device}`);
    name.append(element("tspan", { class: "quiet", dx: 6 }, device.stage_names));
    svg.append(name);
  });
  const panel = element("g", { class: "panel", "data-panel": timeline.key, "clip-path": "url(#plot)" });
  timeline.events.forEach((event) => drawBar(panel, event, x, rows));
  if (timeline.end_s >= view.low && timeline.end_s <= view.high) {
    const bottom = rows + run.devices.length * rowHeight - ROW.gap / 2;
    panel.append(element("line", {
      class: "end", x1: x(timeline.end_s), x2: x(timeline.end_s), y1: rows - 4, y2: bottom,
    }));
  }
  svg.append(panel);
  return rows + run.devices.length * rowHeight;
}

function drawTimelines() {
  const svg = document.getElementById("timelines");
  const width = svg.clientWidth || 1000;
  const right = width - 8;
  const x = (time) => GUTTER + ((time - view.low) / (view.high - view.low)) * (right - GUTTER);
  svg.replaceChildren();
  const panelHeight = 24 + run.devices.length * rowHeight;
  const height = run.timelines.length * (panelHeight + 14) + 22;
  svg.setAttribute("height", height);
  const clip = element("clipPath", { id: "plot" });
  clip.append(element("rect", { x: GUTTER, y: 0, width: Math.max(right - GUTTER + 2, 0), height }));
  svg.append(clip);
  for (const [time, label] of timeLabels(view.low, view.high, Math.max(3, width / 110))) {
    svg.append(element("line", { class: "grid", x1: x(time), x2: x(time), y1: 20, y2: height - 20 }));
    svg.append(element("text", { class: "tick middle", x: x(time), y: height - 5 }, label));
  }
  let top = 0;
  for (const timeline of run.timelines) top = drawPanel(svg, timeline, top, x, right) + 14;
  const cursor = element("line", { class: "cursor", y1: 20, y2: height - 20, visibility: "hidden" });
  const brush = element("rect", { class: "brush", y: 20, height: height - 40, visibility: "hidden" });
  svg.append(cursor, brush);
  const inverse = (pixel) => view.low + ((pixel - GUTTER) / (right - GUTTER)) * (view.high - view.low);
  watchTimelines(svg, cursor, brush, inverse);
  document.getElementById("reset-zoom").hidden = view.low === 0 && view.high === whole;
}

function describe(event) {
  const [device, kind, stage, microBatch, start, end, peer, size] = event;
  const lines = [[`${WORDS[kind]}${microBatch >= 0 ? `, micro-batch ${microBatch}` : ""}`, "strong"]];
  lines.push([`device ${device}, stage ${stage}`]);
  if (peer >= 0) lines.push([`${kind === "RECV" ? "from" : "to"} device ${peer}`]);
  if (size > 0) lines.push([bytes(size)]);
  lines.push([`${seconds(start)} to ${seconds(end)}`], [`takes ${seconds(end - start)}`]);
  return lines;
}

function highlight(svg, key) {
  svg.querySelectorAll(".bar.same").forEach((bar) => bar.classList.remove("same"));
  if (key === null) return;
  svg.querySelectorAll(`.bar[data-key="${key}"]`).forEach((bar) => bar.classList.add("same"));
}

function watchTimelines(svg, cursor, brush, inverse) {
  let from = null;
  const at = (event) => Math.max(event.clientX - svg.getBoundingClientRect().left, GUTTER);
  svg.onpointermove = (event) => {
    const pixel = at(event);
    cursor.setAttribute("x1", pixel);
    cursor.setAttribute("x2", pixel);
    cursor.setAttribute("visibility", "visible");
    if (from !== null) {
      brush.setAttribute("x", Math.min(from, pixel));
      brush.setAttribute("width", Math.abs(pixel - from));
      brush.setAttribute("visibility", "visible");
    }
    const bar = event.target.closest(".bar");
    if (bar) { showTip(event, describe(bar.event)); highlight(svg, bar.dataset.key); }
    else { showTip(event, [[seconds(inverse(pixel))]]); highlight(svg, null); }
  };
  svg.onpointerleave = () => {
    from = null;
    for (const mark of [cursor, brush]) mark.setAttribute("visibility", "hidden");
    highlight(svg, null);
    hideTip();
  };
  svg.onpointerdown = (event) => { from = at(event); event.preventDefault(); };
  svg.onpointerup = (event) => {
    const pixel = at(event);
    if (from !== null && Math.abs(pixel - from) > 6) {
      const ends = [inverse(from), inverse(pixel)].sort((a, b) => a - b);
      [view.low, view.high] = ends;
      drawTimelines();
    }
    from = null;
    brush.setAttribute("visibility", "hidden");
  };
  svg.ondblclick = resetZoom;
}

function resetZoom() { [view.low, view.high] = [0, whole]; drawTimelines(); }
