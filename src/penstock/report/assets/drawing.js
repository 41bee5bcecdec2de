"use strict";
// Draws the figures of a report from the JSON that the page carries. No library, no network.

const run = JSON.parse(document.getElementById("run-data").textContent);

function element(name, attributes = {}, text = null) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  return node;
}

function seconds(value, digits = 4) {
  const size = Math.abs(value);
  if (size >= 1) return `${value.toPrecision(digits)} s`;
  if (size >= 1e-3) return `${(value * 1e3).toPrecision(digits)} ms`;
  return `${(value * 1e6).toPrecision(Math.min(digits, 3))} µs`;
}

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let step = 0;
  while (value >= 1000 && step < units.length - 1) { value /= 1000; step += 1; }
  return `${step ? value.toPrecision(3) : Math.round(value)} ${units[step]}`;
}

// The largest of many values, each with the time before it.
const highest = (pairs) => pairs.reduce((most, [, value]) => Math.max(most, value), 0);

function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const values = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) {
    values.push(i * step);
  }
  return { values, step };
}

function timeLabels(low, high, count) {
  const { values, step } = ticks(low, high, count);
  const [scale, unit] = high >= 1 ? [1, "s"] : high >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  const digits = Math.max(0, -Math.floor(Math.log10(step * scale) + 1e-9));
  return values.map((value) => [value, `${(value * scale).toFixed(digits)} ${unit}`]);
}

const tip = document.getElementById("tip");

function showTip(event, lines) {
  tip.replaceChildren();
  lines.forEach(([text, className]) => {
    const line = document.createElement("div");
    line.textContent = text;
    if (className) line.className = className;
    tip.append(line);
  });
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, window.innerWidth - box.width - 8);
  const above = event.clientY + 18 + box.height > window.innerHeight;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${above ? event.clientY - box.height - 12 : event.clientY + 18}px`;
}

function hideTip() { tip.hidden = true; }
