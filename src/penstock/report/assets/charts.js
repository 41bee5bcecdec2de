// Memory of each device over time, the loss and the throughput over the steps.

function frame(svg, chart) {
  const width = svg.clientWidth || 500;
  const height = chart.height;
  svg.setAttribute("height", height);
  svg.replaceChildren();
  const box = { left: chart.gutter || 58, right: width - 10, top: 10, bottom: height - 26 };
  const scale = (value, [low, high], from, to) => from + ((value - low) / (high - low || 1)) * (to - from);
  const x = (value) => scale(value, chart.x, box.left, box.right);
  const y = (value) => scale(value, chart.y, box.bottom, box.top);
  for (const [value, label] of chart.yLabels) {
    svg.append(element("line", { class: "grid", x1: box.left, x2: box.right, y1: y(value), y2: y(value) }));
    svg.append(element("text", { class: "tick end-anchor", x: box.left - 7, y: y(value) + 4 }, label));
  }
  for (const [value, label] of chart.xLabels(Math.max(2, width / 95))) {
    svg.append(element("text", { class: "tick middle", x: x(value), y: height - 7 }, label));
  }
  return { x, y, box };
}

function plainLabels(low, high, count) {
  const { values, step } = ticks(low, high, count);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return values.map((value) => [value, value.toFixed(digits)]);
}

function path(points, x, y, stepped) {
  return points.map(([a, b], i) => {
    if (i === 0) return `M${x(a)},${y(b)}`;
    return stepped ? `H${x(a)}V${y(b)}` : `L${x(a)},${y(b)}`;
  }).join("");
}

function drawCurve(id, series, format, fromZero) {
  const svg = document.getElementById(id);
  const drawn = series.filter((s) => s.points.length);
  if (!svg || !drawn.length) return;
  const all = drawn.flatMap((s) => s.points);
  const [values, steps] = [all.map((p) => p[1]), all.map((p) => p[0])];
  const high = Math.max(...values);
  const low = fromZero ? 0 : Math.min(...values);
  const margin = (high - low || Math.abs(high) || 1) * 0.06;
  const y = [fromZero ? 0 : low - margin, high + margin];
  const x = [Math.min(...steps), Math.max(...steps)];
  const chart = {
    height: 230, x, y, yLabels: plainLabels(...y, 5),
    xLabels: (n) => ticks(...x, n).values.filter(Number.isInteger).map((v) => [v, `${v}`]),
  };
  const place = frame(svg, chart);
  for (const one of drawn) {
    svg.append(element("path", { class: `line ${one.name}`, d: path(one.points, place.x, place.y) }));
    if (one.points.length < 60 && one.name === "evaluation") {
      one.points.forEach(([a, b]) => svg.append(element("circle", {
        class: `dot ${one.name}`, cx: place.x(a), cy: place.y(b), r: 3.2,
      })));
    }
  }
  watchCurve(svg, drawn, place, format);
}

function watchCurve(svg, series, place, format) {
  const cursor = element("line", {
    class: "cursor", y1: place.box.top, y2: place.box.bottom, visibility: "hidden",
  });
  svg.append(cursor);
  svg.onpointermove = (event) => {
    const pixel = event.clientX - svg.getBoundingClientRect().left;
    const near = series.map((s) => s.points.reduce((best, point) => (
      Math.abs(place.x(point[0]) - pixel) < Math.abs(place.x(best[0]) - pixel) ? point : best)));
    cursor.setAttribute("x1", place.x(near[0][0]));
    cursor.setAttribute("x2", place.x(near[0][0]));
    cursor.setAttribute("visibility", "visible");
    showTip(event, [[`step ${near[0][0]}`, "strong"],
      ...near.map((point, i) => [`${series[i].label} ${format(point[1])}`
        + (point[0] === near[0][0] ? "" : ` (step ${point[0]})`)])]);
  };
  svg.onpointerleave = () => { cursor.setAttribute("visibility", "hidden"); hideTip(); };
}

function drawMemory(device) {
  const svg = document.getElementById(`memory-${device.device}`);
  if (!svg) return;
  const [{ end_s: end, rows: predicted }] = run.timelines;
  const row = predicted.find((one) => one.device === device.device);
  const points = [...(row?.memory ?? [])];
  const peak = Math.max(highest(points), device.measured_peak_bytes, 1);
  const high = Math.max(peak, device.limit_bytes) * 1.12;
  const values = ticks(0, high, 4).values.map((value) => [value, bytes(value)]);
  const chart = {
    height: 150, gutter: 62, x: [0, end], y: [0, high], yLabels: values,
    xLabels: (n) => timeLabels(0, end, Math.max(2, n)),
  };
  const { x, y, box } = frame(svg, chart);
  if (points.length) {
    points.push([end, points[points.length - 1][1]]);
    const line = path(points, x, y, true);
    svg.append(element("path", { class: "area", d: `${line}V${box.bottom}H${x(points[0][0])}Z` }));
    svg.append(element("path", { class: "line memory-predicted", d: line }));
  }
  const level = (value, name) => svg.append(element("line", {
    class: `level ${name}`, x1: box.left, x2: box.right, y1: y(value), y2: y(value),
  }));
  if (device.limit_bytes > 0) level(device.limit_bytes, "limit");
  if (device.measured_peak_bytes > 0) level(device.measured_peak_bytes, "measured-peak");
  svg.onpointermove = (event) => {
    const pixel = event.clientX - svg.getBoundingClientRect().left;
    const time = ((pixel - box.left) / (box.right - box.left)) * end;
    const now = points.filter((p) => p[0] <= time).pop() || points[0];
    if (now) showTip(event, [[bytes(now[1]), "strong"], [`predicted at ${seconds(Math.max(time, 0), 3)}`]]);
  };
  svg.onpointerleave = hideTip;
}

function drawAll() {
  run.devices.forEach(drawMemory);
  drawCurve("loss", [
    { name: "training", label: "training", points: run.training },
    { name: "evaluation", label: "evaluation", points: run.evaluations },
  ], (v) => v.toPrecision(4), false);
  drawCurve("throughput", [
    { name: "samples", label: "samples/s", points: run.samples_per_s },
  ], (v) => v.toPrecision(3), true);
}

let drawnWidth = 0;
new ResizeObserver(() => {
  if (document.body.clientWidth === drawnWidth) return;
  drawnWidth = document.body.clientWidth;
  drawAll();
}).observe(document.body);
