// A timeline to zoom and move in. Only what is in view is drawn; blocks narrower than a pixel are
// drawn by columns, each in the colour that takes most of it.

const GUTTER = 150;
const RIGHT = 16;
const AXIS = 26;
const view = document.getElementById("view");
const canvas = document.getElementById("chart");
const pen = canvas.getContext("2d");
const dark = matchMedia("(prefers-color-scheme: dark)");
const whole = run.end_s || 1;
const range = { low: 0, high: whole };
const has = {
  messages: run.rows.some((row) => row.messages.some((lane) => lane.length)),
  memory: run.rows.some((row) => row.memory.length),
};
const shown = { ...has };
const peak = Math.max(...run.rows.map((row) => Math.max(0, ...row.memory.map((m) => m[1]))));
const full = Math.max(
  peak, ...run.rows.map((row) => (row.limit_bytes <= 4 * peak ? row.limit_bytes : 0)),
) * 1.06 || 1;

const START = 4;
const END = 5;

// Where the lanes of a row are, from its top: [offset, height, blocks].
function lanesOf(row) {
  const height = 24 / row.compute.length;
  const lanes = row.compute.map((blocks, i) => [i * height, height, blocks]);
  if (shown.messages) row.messages.forEach((blocks, i) => lanes.push([26 + i * 7, 6, blocks]));
  return lanes;
}
const memoryTop = () => (shown.messages ? 42 : 27);
const rowHeight = () => memoryTop() + (shown.memory ? 34 : 0) + 6;
const rowTop = (index) => AXIS + index * rowHeight() - view.scrollTop;
const plotWidth = () => Math.max(canvas.clientWidth - GUTTER - RIGHT, 50);
const xOf = (time) => GUTTER + ((time - range.low) / (range.high - range.low)) * plotWidth();
const timeAt = (x) => range.low + ((x - GUTTER) / plotWidth()) * (range.high - range.low);
const theme = () => run.themes[dark.matches ? "dark" : "light"];

// The first of sorted rows whose value in a column is beyond a limit.
function firstBeyond(rows, column, limit) {
  let [low, high] = [0, rows.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rows[middle][column] > limit) high = middle; else low = middle + 1;
  }
  return low;
}

function drawLane(blocks, y, height, colours) {
  let column = -1;
  let shares = new Map();
  const fill = (place, style, share) => {
    if (place !== column) { flush(); column = place; }
    shares.set(style, (shares.get(style) || 0) + share);
  };
  const flush = () => {
    let [best, total, style] = [0, 0, -1];
    for (const [one, share] of shares) {
      total += share;
      if (share > best) [best, style] = [share, one];
    }
    if (style >= 0) {
      pen.globalAlpha = Math.min(1, 0.25 + 0.75 * total);
      pen.fillStyle = colours.fills[style];
      pen.fillRect(column, y, 1, height);
      pen.globalAlpha = 1;
    }
    shares = new Map();
  };
  for (let i = 0; i < blocks.length && blocks[i][START] <= range.high; i += 1) {
    const block = blocks[i];
    if (block[END] < range.low) continue;
    const [left, right] = [xOf(block[START]), xOf(block[END])];
    if (right - left < 1) {
      const edge = Math.floor(left) + 1;
      fill(edge - 1, block[0], Math.min(right, edge) - left);
      if (right > edge) fill(edge, block[0], right - edge);
      continue;
    }
    drawBlock(block, Math.max(left, GUTTER - 2), Math.min(right, canvas.clientWidth), y, height, colours);
  }
  flush();
}

function drawBlock(block, left, right, y, height, colours) {
  const width = right - left - (right - left > 4 ? 0.8 : right - left > 2 ? 0.3 : 0);
  pen.fillStyle = colours.fills[block[0]];
  pen.fillRect(left, y, width, height);
  const label = block[3] >= 0 ? `${block[3]}` : "";
  if (!label || height < 11 || width < 6 + 6.6 * label.length) return;
  pen.fillStyle = colours.inks[block[0]];
  pen.textAlign = "center";
  pen.fillText(label, left + width / 2, y + height / 2 + 4);
}

function drawMemory(row, y, colours) {
  const height = 30;
  const base = y + height;
  const level = (size) => base - (size / full) * height;
  pen.fillStyle = colours.row;
  pen.fillRect(GUTTER, y, plotWidth(), height);
  const first = Math.max(firstBeyond(row.memory, 0, range.low) - 1, 0);
  const begin = Math.max(xOf(row.memory[first][0]), GUTTER);
  const end = Math.min(xOf(whole), GUTTER + plotWidth());
  let last = level(row.memory[first][1]);
  const line = new Path2D();
  line.moveTo(begin, last);
  for (let i = first; i < row.memory.length && row.memory[i][0] <= range.high; i += 1) {
    const x = Math.max(xOf(row.memory[i][0]), GUTTER);
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
    pen.strokeStyle = colours.limit;
    pen.setLineDash([5, 3]);
    pen.beginPath();
    pen.moveTo(GUTTER, limit);
    pen.lineTo(GUTTER + plotWidth(), limit);
    pen.stroke();
    pen.setLineDash([]);
  }
}

function drawLabels(row, top, colours) {
  pen.textAlign = "left";
  pen.fillStyle = colours.ink;
  pen.fillText(`device ${row.device}`, 16, top + 12);
  pen.fillStyle = colours.quiet;
  pen.fillText(row.stages, 16, top + 26);
  if (!shown.memory || !row.memory.length) return;
  const limit = row.limit_bytes > 0 ? ` of ${bytes(row.limit_bytes)}` : "";
  const most = Math.max(...row.memory.map((m) => m[1]));
  pen.fillText(`${bytes(most)}${limit}`, 16, top + memoryTop() + 19);
}

function drawAxis(colours, labels) {
  pen.fillStyle = getComputedStyle(document.body).backgroundColor;
  pen.fillRect(0, 0, canvas.clientWidth, AXIS - 4);
  pen.fillStyle = colours.quiet;
  for (const [time, label] of labels) {
    const x = xOf(time);
    const half = pen.measureText(label).width / 2;
    if (x + half > canvas.clientWidth) continue;
    pen.textAlign = "center";
    pen.fillText(label, x, 15);
  }
}

function draw() {
  const [width, height] = [view.clientWidth, view.clientHeight];
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const content = AXIS + run.rows.length * rowHeight() + 8;
  document.getElementById("extent").style.height = `${Math.max(content - height, 0)}px`;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.font = '12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
  const colours = theme();
  const labels = timeLabels(range.low, range.high, Math.max(2, plotWidth() / 110));
  const first = Math.max(0, Math.floor((view.scrollTop - AXIS) / rowHeight()));
  const last = Math.min(run.rows.length, first + Math.ceil(height / rowHeight()) + 2);
  const bottom = Math.min(rowTop(run.rows.length), height);
  pen.save();
  pen.beginPath();
  pen.rect(GUTTER, 0, plotWidth() + 1, height);
  pen.clip();
  for (let i = first; i < last; i += 1) {
    pen.fillStyle = colours.row;
    pen.fillRect(GUTTER, rowTop(i), plotWidth(), 24);
    if (shown.memory && run.rows[i].memory.length) {
      drawMemory(run.rows[i], rowTop(i) + memoryTop(), colours);
    }
  }
  pen.fillStyle = colours.grid;
  for (const [time] of labels) pen.fillRect(xOf(time), AXIS - 4, 1, bottom - AXIS);
  for (let i = first; i < last; i += 1) {
    for (const [offset, tall, blocks] of lanesOf(run.rows[i])) {
      drawLane(blocks, rowTop(i) + offset, tall, colours);
    }
  }
  pen.restore();
  for (let i = first; i < last; i += 1) drawLabels(run.rows[i], rowTop(i), colours);
  drawAxis(colours, labels);
}

let waiting = false;
function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; draw(); });
}

function setRange(low, span) {
  const kept = Math.min(Math.max(span, whole * 1e-6), whole);
  range.low = Math.min(Math.max(low, 0), whole - kept);
  range.high = range.low + kept;
  redraw();
}
const span = () => range.high - range.low;
function zoom(factor, time = (range.low + range.high) / 2) {
  const next = Math.min(span() * factor, whole);
  setRange(time - ((time - range.low) / span()) * next, next);
}
const showAll = () => setRange(0, whole);

// The row under a place, and the block there or null.
function under(x, y) {
  const index = Math.floor((y - AXIS + view.scrollTop) / rowHeight());
  const row = run.rows[index];
  if (!row || y < AXIS - 4 || x < GUTTER) return null;
  const [time, near] = [timeAt(x), (span() / plotWidth()) * 1.5];
  for (const [offset, height, blocks] of lanesOf(row)) {
    const inside = y - rowTop(index) - offset;
    if (inside < 0 || inside >= height) continue;
    // Messages to several devices may overlap: the last that started is on top.
    for (let i = firstBeyond(blocks, START, time + near) - 1; i >= 0; i -= 1) {
      if (blocks[i][END] >= time - near) return { row, time, block: blocks[i] };
    }
  }
  return { row, time, block: null, inMemory: y - rowTop(index) >= memoryTop() };
}

function describe({ row, time, block, inMemory }) {
  if (!block) {
    const lines = [[`device ${row.device}`, "strong"], [`at ${seconds(time)}`]];
    const index = firstBeyond(row.memory, 0, time) - 1;
    if (shown.memory && index >= 0) lines.push([`${bytes(row.memory[index][1])} in use`]);
    if (inMemory && row.limit_bytes > 0) lines.push([`limit ${bytes(row.limit_bytes)}`]);
    return lines;
  }
  const [, kind, stage, microBatch, start, end, peer, size] = block;
  const number = microBatch >= 0 ? `, micro-batch ${microBatch}` : "";
  const lines = [[`${WORDS[kind]}${number}`, "strong"], [`device ${row.device}, stage ${stage}`]];
  if (peer >= 0) lines.push([`${kind === "RECV" ? "from" : "to"} device ${peer}`]);
  if (size > 0) lines.push([bytes(size)]);
  lines.push([`${seconds(start, 6)} to ${seconds(end, 6)}`], [`takes ${seconds(end - start)}`]);
  return lines;
}

let drag = null;
function placeIn(event) {
  const box = canvas.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}
view.onpointerdown = (event) => {
  if (event.offsetX > view.clientWidth) return;
  drag = { x: event.clientX, y: event.clientY, low: range.low, top: view.scrollTop };
  view.setPointerCapture(event.pointerId);
  view.classList.add("moving");
  hideTip();
};
view.onpointermove = (event) => {
  if (drag) {
    setRange(drag.low - ((event.clientX - drag.x) / plotWidth()) * span(), span());
    view.scrollTop = drag.top - (event.clientY - drag.y);
    return;
  }
  const found = under(...placeIn(event));
  if (found) showTip(event, describe(found)); else hideTip();
};
view.onpointerup = view.onpointercancel = () => { drag = null; view.classList.remove("moving"); };
view.onpointerleave = hideTip;
view.ondblclick = showAll;
view.onscroll = redraw;
view.addEventListener("wheel", (event) => {
  event.preventDefault();
  const steps = event.deltaMode ? 30 : 1;
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    const moved = (event.deltaX || event.deltaY) * steps;
    setRange(range.low + (moved / plotWidth()) * span(), span());
  } else {
    zoom(Math.exp(event.deltaY * steps * 0.0018), timeAt(Math.max(placeIn(event)[0], GUTTER)));
  }
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
  label.hidden = !has[part];
  label.querySelector("input").onchange = (event) => { shown[part] = event.target.checked; redraw(); };
}
dark.addEventListener("change", redraw);
new ResizeObserver(redraw).observe(view);
draw();
