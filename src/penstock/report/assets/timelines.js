// Timelines one above the other on one time axis, to zoom and move in. Only what is in view is
// drawn. Blocks narrower than a pixel are drawn by columns, of which each kind fills its share.

const AXIS = 26;
const TITLE = 28;
const COMPUTE = 24;
const MESSAGES = { top: 26, pitch: 7, height: 6 };
const MEMORY = 30;
const GAP = 6;
const view = document.getElementById("view");
const canvas = document.getElementById("chart");
const pen = canvas.getContext("2d");
const dark = matchMedia("(prefers-color-scheme: dark)");
const rows = run.timelines.flatMap((timeline) => timeline.rows);
const whole = Math.max(...run.timelines.map((timeline) => timeline.end_s)) || 1;
const range = { low: 0, high: whole };
const shown = { messages: true, memory: true };
const peaks = new Map(rows.map((row) => [row, highest(row.memory)]));
const peak = Math.max(...peaks.values());
const full = Math.max(
  peak, ...rows.map((row) => (row.limit_bytes <= 4 * peak ? row.limit_bytes : 0)),
) * 1.06 || 1;
// From top to bottom: the title of a timeline (without row), or one of its rows.
let bands = [];
// The pixels at the left of the plot, and its width.
let gutter = 0;
let plotWidth = 50;

const has = {
  messages: rows.some((row) => row.messages.some((lane) => lane.start_s.length)),
  memory: rows.some((row) => row.memory.length),
};
const hasMemory = (row) => shown.memory && row.memory.length > 0;
const memoryTop = () => (shown.messages && has.messages ? 42 : COMPUTE + 3);

function memoryWords(row) {
  return bytes(peaks.get(row)) + (row.limit_bytes > 0 ? ` of ${bytes(row.limit_bytes)}` : "");
}

// Places the bands, and leaves room for the widest words at the left.
function arrange() {
  let top = AXIS;
  bands = [];
  const add = (timeline, row, height) => {
    bands.push({ timeline, row, top, height });
    top += height;
  };
  for (const timeline of run.timelines) {
    if (timeline.title) add(timeline, null, TITLE);
    for (const row of timeline.rows) {
      add(timeline, row, memoryTop() + (hasMemory(row) ? MEMORY + 4 : 0) + GAP);
    }
  }
  document.getElementById("extent").style.height = `${top + 8}px`;
  setFont();
  const words = rows.flatMap((row) => [
    `device ${row.device}`, row.stages, hasMemory(row) ? memoryWords(row) : "",
  ]);
  gutter = 14 + Math.max(...words.map((text) => pen.measureText(text).width));
  redraw();
}

// The lanes of a row: how far each is below the row's top, its height, and its blocks.
function lanesOf(row) {
  const height = COMPUTE / row.compute.length;
  const lanes = row.compute.map((lane, i) => [i * height, height, lane]);
  if (!shown.messages) return lanes;
  const { top, pitch, height: low } = MESSAGES;
  return [...lanes, ...row.messages.map((lane, i) => [top + i * pitch, low, lane])];
}

const span = () => range.high - range.low;
const xOf = (time) => gutter + ((time - range.low) / span()) * plotWidth;
const timeAt = (x) => range.low + ((x - gutter) / plotWidth) * span();
const yOf = (band) => band.top - view.scrollTop;
const bandsInView = () => bands.filter((band) => (
  yOf(band) + band.height > 0 && yOf(band) < view.clientHeight));

// The first of sorted values that is beyond a limit.
function firstBeyond(count, value, limit) {
  let [low, high] = [0, count];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (value(middle) > limit) high = middle; else low = middle + 1;
  }
  return low;
}

function drawLane(lane, y, height, colours) {
  let column = -1;
  let shares = new Map();
  const fill = (place, style, share) => {
    if (place !== column) { flush(); column = place; }
    shares.set(style, (shares.get(style) || 0) + share);
  };
  const flush = () => {
    // A low lane has no room for a stack: the fuller a column, the stronger its colour.
    const stacks = height > 8;
    let bottom = y + height;
    for (const [style, share] of [...shares].sort((a, b) => a[0] - b[0])) {
      const part = stacks ? Math.max(share * height, 1) : height;
      pen.globalAlpha = stacks ? 1 : Math.min(0.3 + 0.7 * share, 1);
      pen.fillStyle = colours.fills[style];
      pen.fillRect(column, bottom - part, 1, part);
      if (stacks) bottom -= part;
    }
    pen.globalAlpha = 1;
    shares = new Map();
  };
  for (let i = 0; i < lane.start_s.length && lane.start_s[i] <= range.high; i += 1) {
    if (lane.end_s[i] < range.low) continue;
    const [left, right] = [xOf(lane.start_s[i]), xOf(lane.end_s[i])];
    if (right - left >= 1) {
      drawBlock(lane, i, [Math.max(left, gutter - 2), Math.min(right, gutter + plotWidth + 2)],
        y, height, colours);
      continue;
    }
    const edge = Math.floor(left) + 1;
    fill(edge - 1, lane.style[i], Math.min(right, edge) - left);
    if (right > edge) fill(edge, lane.style[i], right - edge);
  }
  flush();
}

function drawBlock(lane, index, [left, right], y, height, colours) {
  const style = lane.style[index];
  const width = right - left - (right - left > 4 ? 0.8 : right - left > 2 ? 0.3 : 0);
  pen.fillStyle = colours.fills[style];
  pen.fillRect(left, y, width, height);
  const number = lane.micro_batch[index];
  const label = number >= 0 ? `${number}` : run.kinds[style] === "STEP" ? "step" : "";
  if (!label || height < 11 || width < 6 + 6.6 * label.length) return;
  pen.fillStyle = colours.inks[style];
  pen.textAlign = "center";
  pen.fillText(label, left + width / 2, y + height / 2 + 4);
}

function drawMemoryLine(row, y, colours) {
  const base = y + MEMORY;
  const level = (size) => base - (size / full) * MEMORY;
  pen.fillStyle = colours.row;
  pen.fillRect(gutter, y, plotWidth, MEMORY);
  const first = Math.max(sampleAt(row, range.low), 0);
  const begin = Math.max(xOf(row.memory[first][0]), gutter);
  const end = Math.min(xOf(whole), gutter + plotWidth);
  let last = level(row.memory[first][1]);
  const line = new Path2D();
  line.moveTo(begin, last);
  for (let i = first; i < row.memory.length && row.memory[i][0] <= range.high; i += 1) {
    const x = Math.max(xOf(row.memory[i][0]), gutter);
    line.lineTo(x, last);
    last = level(row.memory[i][1]);
    line.lineTo(x, last);
  }
  line.lineTo(end, last);
  const area = new Path2D(line);
  area.lineTo(end, base);
  area.lineTo(begin, base);
  pen.fillStyle = colours.area;
  pen.fill(area);
  pen.strokeStyle = colours.quiet;
  pen.stroke(line);
  const limit = level(row.limit_bytes);
  if (row.limit_bytes > 0 && limit >= y) {
    drawDashes(gutter, limit, gutter + plotWidth, limit, colours.limit);
  }
}

// The last sample of a row's memory at a time, -1 before the first.
const sampleAt = (row, time) => firstBeyond(row.memory.length, (i) => row.memory[i][0], time) - 1;

function drawDashes(x1, y1, x2, y2, colour) {
  pen.strokeStyle = colour;
  pen.setLineDash([5, 3]);
  pen.beginPath();
  pen.moveTo(x1, y1);
  pen.lineTo(x2, y2);
  pen.stroke();
  pen.setLineDash([]);
}

function drawWords({ timeline, row }, top, colours) {
  pen.textAlign = "left";
  pen.fillStyle = colours.ink;
  if (!row) {
    setFont(600);
    pen.fillText(timeline.title, 0, top + 17);
    const left = pen.measureText(timeline.title).width + 8;
    setFont();
    pen.fillStyle = colours.quiet;
    pen.fillText(timeline.note, left, top + 17);
    return;
  }
  pen.fillText(`device ${row.device}`, 0, top + 12);
  pen.fillStyle = colours.quiet;
  pen.fillText(row.stages, 0, top + 26);
  if (hasMemory(row)) pen.fillText(memoryWords(row), 0, top + memoryTop() + 19);
}

// What is behind the blocks of a row, and the blocks.
function drawRow({ timeline, row, height }, top, labels, colours) {
  pen.fillStyle = colours.row;
  pen.fillRect(gutter, top, plotWidth, COMPUTE);
  if (hasMemory(row)) drawMemoryLine(row, top + memoryTop(), colours);
  pen.fillStyle = colours.grid;
  for (const [time] of labels) pen.fillRect(xOf(time), top - 4, 1, height);
  for (const [offset, tall, lane] of lanesOf(row)) drawLane(lane, top + offset, tall, colours);
  if (timeline.end_s >= whole) return;
  const end = xOf(timeline.end_s);
  drawDashes(end, top - 2, end, top + height - 2, colours.ink);
}

function drawAxis(colours, labels) {
  pen.fillStyle = getComputedStyle(view).backgroundColor;
  pen.fillRect(0, 0, canvas.clientWidth, AXIS - 4);
  pen.fillStyle = colours.quiet;
  pen.textAlign = "center";
  for (const [time, label] of labels) {
    const most = canvas.clientWidth - pen.measureText(label).width / 2;
    pen.fillText(label, Math.min(xOf(time), most), 15);
  }
}

function setFont(weight = 400) {
  pen.font = `${weight} 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif`;
}

function draw() {
  const [width, height] = [canvas.parentElement.clientWidth, view.clientHeight];
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  plotWidth = Math.max(width - gutter, 50);
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  setFont();
  const colours = run.themes[dark.matches ? "dark" : "light"];
  const labels = timeLabels(range.low, range.high, Math.max(2, plotWidth / 110));
  const seen = bandsInView();
  pen.save();
  pen.beginPath();
  pen.rect(gutter, 0, plotWidth + 1, height);
  pen.clip();
  for (const band of seen) if (band.row) drawRow(band, yOf(band), labels, colours);
  pen.restore();
  for (const band of seen) drawWords(band, yOf(band), colours);
  drawAxis(colours, labels);
}

let waiting = false;
function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; draw(); });
}

function setRange(low, wanted) {
  const kept = Math.min(Math.max(wanted, whole * 1e-6), whole);
  range.low = Math.min(Math.max(low, 0), whole - kept);
  range.high = range.low + kept;
  leave();
  redraw();
}
function zoom(factor, time = (range.low + range.high) / 2) {
  const next = Math.min(span() * factor, whole);
  setRange(time - ((time - range.low) / span()) * next, next);
}
const showAll = () => setRange(0, whole);

// The row at a place with the time there, and the block or null; null outside the rows.
function under(x, y) {
  const band = bands.find((one) => y >= yOf(one) && y < yOf(one) + one.height);
  if (!band?.row || y < AXIS - 4 || x < gutter) return null;
  const { row } = band;
  const [time, near, inside] = [timeAt(x), (span() / plotWidth) * 1.5, y - yOf(band)];
  for (const [offset, height, lane] of lanesOf(row)) {
    if (inside < offset || inside >= offset + height) continue;
    // Messages to several devices may overlap: the last that started is on top.
    const beyond = firstBeyond(lane.start_s.length, (i) => lane.start_s[i], time + near);
    for (let i = beyond - 1; i >= 0; i -= 1) {
      if (lane.end_s[i] >= time - near) return { row, time, block: blockOf(lane, i) };
    }
  }
  return { row, time, block: null, inMemory: inside >= memoryTop() };
}

// One block of a lane; what a lane of computing does not list, peers and bytes, is undefined.
const blockOf = (lane, index) => (
  Object.fromEntries(Object.entries(lane).map(([name, values]) => [name, values[index]])));

function describe({ row, time, block, inMemory }) {
  if (!block) {
    const lines = [[`device ${row.device}`, "strong"], [`at ${seconds(time)}`]];
    const index = sampleAt(row, time);
    if (shown.memory && index >= 0) lines.push([`${bytes(row.memory[index][1])} in use`]);
    if (inMemory && row.limit_bytes > 0) lines.push([`limit ${bytes(row.limit_bytes)}`]);
    return lines;
  }
  const kind = run.kinds[block.style];
  const number = block.micro_batch >= 0 ? `, micro-batch ${block.micro_batch}` : "";
  const lines = [[`${run.words[kind]}${number}`, "strong"]];
  lines.push([`device ${row.device}, stage ${block.stage}`]);
  if (block.peer >= 0) lines.push([`${kind === "RECV" ? "from" : "to"} device ${block.peer}`]);
  if (block.bytes > 0) lines.push([bytes(block.bytes)]);
  lines.push([`${seconds(block.start_s, 6)} to ${seconds(block.end_s, 6)}`]);
  lines.push([`takes ${seconds(block.end_s - block.start_s)}`]);
  return lines;
}

// Frames a block, and the same piece of work in the other timelines.
function frameSame(row, block) {
  const same = (lane, i) => ["style", "stage", "micro_batch", "peer"].every(
    (name) => lane[name][i] === block[name]);
  const frames = [];
  for (const band of bandsInView()) {
    if (band.row?.device !== row.device) continue;
    for (const [offset, height, lane] of lanesOf(band.row)) {
      for (let i = 0; i < lane.start_s.length; i += 1) {
        if (!same(lane, i) || lane.end_s[i] < range.low || lane.start_s[i] > range.high) continue;
        const mark = document.createElement("div");
        mark.className = "same";
        place(mark, xOf(lane.start_s[i]), xOf(lane.end_s[i]), yOf(band) + offset, height);
        frames.push(mark);
      }
    }
  }
  document.getElementById("frames").replaceChildren(...frames);
}

// Puts a mark between two places, as far as they are on the plot.
function place(mark, from, to, top, height) {
  const ends = [from, to].map((x) => Math.min(Math.max(x, gutter), gutter + plotWidth));
  const left = Math.min(...ends);
  const width = Math.max(...ends) - left;
  Object.assign(mark.style, {
    left: `${left}px`, width: `${width}px`, top: `${top}px`, height: `${height}px`,
  });
  mark.hidden = false;
}

const cursor = document.getElementById("cursor");
const brush = document.getElementById("brush");
let drag = null;
function placeIn(event) {
  const box = canvas.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}
// Dragging selects a part to zoom into if it begins among the times or with Shift.
const selects = (event) => event.shiftKey || placeIn(event)[1] < AXIS - 4;
function point(event) {
  const [x, y] = placeIn(event);
  place(cursor, x, x, AXIS - 4, canvas.clientHeight - AXIS + 4);
  view.classList.toggle("selecting", selects(event));
  const found = under(x, y);
  if (!found) { leave(); return; }
  showTip(event, describe(found));
  if (found.block) frameSame(found.row, found.block);
  else document.getElementById("frames").replaceChildren();
}
function leave() {
  hideTip();
  cursor.hidden = true;
  document.getElementById("frames").replaceChildren();
}
view.onpointerdown = (event) => {
  if (event.offsetX > view.clientWidth || event.button !== 0) return;
  const [x] = placeIn(event);
  drag = { x, y: event.clientY, low: range.low, top: view.scrollTop, selects: selects(event) };
  view.setPointerCapture(event.pointerId);
  view.classList.add("moving");
  leave();
};
view.onpointermove = (event) => {
  if (!drag) { point(event); return; }
  const [x] = placeIn(event);
  if (drag.selects) { place(brush, drag.x, x, AXIS - 4, canvas.clientHeight); return; }
  setRange(drag.low - ((x - drag.x) / plotWidth) * span(), span());
  view.scrollTop = drag.top - (event.clientY - drag.y);
};
view.onpointerup = (event) => {
  const ends = drag?.selects ? [drag.x, placeIn(event)[0]].sort((a, b) => a - b) : [0, 0];
  if (ends[1] - ends[0] > 6) setRange(timeAt(ends[0]), timeAt(ends[1]) - timeAt(ends[0]));
  release();
};
function release() {
  drag = null;
  brush.hidden = true;
  view.classList.remove("moving");
}
view.onpointercancel = release;
view.onpointerleave = leave;
view.ondblclick = showAll;
view.onscroll = () => { leave(); redraw(); };
view.addEventListener("wheel", (event) => {
  const steps = event.deltaMode ? 30 : 1;
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    const moved = (event.deltaX || event.deltaY) * steps;
    setRange(range.low + (moved / plotWidth) * span(), span());
  } else if (event.ctrlKey || document.documentElement.scrollHeight <= window.innerHeight) {
    zoom(Math.exp(event.deltaY * steps * 0.0018), timeAt(Math.max(placeIn(event)[0], gutter)));
  } else {
    return; // The page scrolls.
  }
  event.preventDefault();
}, { passive: false });
view.onkeydown = (event) => {
  const keys = {
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: showAll,
    ArrowLeft: () => setRange(range.low - span() / 8, span()),
    ArrowRight: () => setRange(range.low + span() / 8, span()),
  };
  if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
  keys[event.key]();
  event.preventDefault();
};
document.getElementById("zoom-in").onclick = () => zoom(0.6);
document.getElementById("zoom-out").onclick = () => zoom(1 / 0.6);
document.getElementById("show-all").onclick = showAll;
for (const part of ["messages", "memory"]) {
  const label = document.getElementById(`with-${part}`);
  const box = label.querySelector("input");
  label.hidden = !has[part];
  shown[part] = box.checked;
  box.onchange = () => { shown[part] = box.checked; arrange(); };
}
dark.addEventListener("change", redraw);
arrange();
draw();
new ResizeObserver(redraw).observe(view);
