"use strict";
// The data, and the tree: where its blocks are, their colours, and how they are drawn.
// Text from the data reaches the page as text nodes only: `element` never parses it.
const data = JSON.parse(document.getElementById("data").textContent);
const { depth, count, samples } = data;
const nodes = 2 ** depth - 1, leaves = 2 ** depth, groups = nodes + leaves;
const get = (id) => document.getElementById(id);
const state = { group: 0, input: null, view: 0, colour: "", width: "usage" };

function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made && name !== "role") made[name] = value; else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}
const level = (group) => Math.floor(Math.log2(group + 1));
const parent = (group) => (group - 1) >> 1;
const isLeaf = (group) => group >= nodes;
const nameOf = (group) => (isLeaf(group) ? `leaf ${group - nodes}` : group ? `node ${group}` : "root");
const capital = (text) => text[0].toUpperCase() + text.slice(1);
const whole = (value) => value.toLocaleString("en");
const percent = (value) => (value === 0 || value === 1 ? `${100 * value} %` : `${(100 * value).toFixed(1)} %`);
function number(value) {
  if (value === null || value === undefined) return "-";
  if (Math.abs(value) >= 1000) return whole(Math.round(value));
  return value && Math.abs(value) < 1e-6 ? "≈ 0" : String(Number(value.toPrecision(3)));
}
const className = (label) => (label === -1 ? "others" : data.classes[label] ?? String(label));
const tokenName = (token) => (token === -1 ? "others" : JSON.stringify(data.texts[token] ?? String(token)).slice(1, -1));

// ---- the tree: where each block starts and ends, from 0 to 1
const place = { usage: layout((g) => count[g]), equal: layout((g) => 2 ** (depth - level(g))) };
function layout(weight) {
  const start = new Float64Array(groups), end = new Float64Array(groups);
  end[0] = 1;
  for (let g = 0; g < nodes; g++) {
    const left = 2 * g + 1, sum = weight(left) + weight(left + 1);
    const middle = start[g] + (end[g] - start[g]) * (sum ? weight(left) / sum : 0.5);
    start[left] = start[g]; end[left] = start[left + 1] = middle; end[left + 1] = end[g];
  }
  return { start, end };
}

const measures = {
  labels: data.labels && "most frequent label", accuracy: data.accuracy && "accuracy", purity: data.purity && "purity",
  loss: data.loss && "loss", target: data.target && "mean target", share: "inputs, × fair share", entropy: "entropy of decisions", margin: data.distance ? "distance to the boundary" : "logit",
};
function measured(name) {
  if (name === "share") return count.map((n, g) => n / samples * 2 ** level(g));
  return data[name];
}
let ramp = null;  // the values of the chosen colour, with their range
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
let theme = {};
function readTheme() {
  for (const name of ["page", "ink", "soft", "line", "shade", "link", "low", "path"]) theme[name] = style(`--${name}`);
  theme.dark = matchMedia("(prefers-color-scheme: dark)").matches;
}
function mix(a, b, t) {
  const part = (colour, i) => parseInt(colour.length === 4 ? colour[i + 1].repeat(2) : colour.slice(2 * i + 1, 2 * i + 3), 16);
  return `rgb(${[0, 1, 2].map((i) => Math.round(part(a, i) * (1 - t) + part(b, i) * t)).join(" ")})`;
}
const order = Object.keys(data.classes).map(Number).sort((a, b) => a - b);
const oklch = CSS.supports("color", "oklch(0.5 0.1 20)");  // equal lightness for all hues, where the browser has it
function classColour(label, strength = 1) {
  const at = Math.max(0, order.indexOf(label)), n = Math.max(order.length, 1), odd = at % 2;
  const hue = n <= 12 ? 360 * at / n + 20 : (at * 137.5) % 360;
  if (oklch) {
    const light = theme.dark ? 0.3 + 0.2 * strength + 0.07 * odd : 0.96 - 0.16 * strength - 0.07 * odd;
    return `oklch(${light.toFixed(3)} ${(0.02 + 0.11 * strength).toFixed(3)} ${hue.toFixed(0)})`;
  }
  const light = theme.dark ? 30 + 14 * strength + odd * 5 : 92 - 24 * strength - odd * 7;
  return `hsl(${hue.toFixed(0)} ${(25 + 40 * strength).toFixed(0)}% ${light.toFixed(0)}%)`;
}
function colourOf(group) {
  if (!count[group]) return theme.page;
  if (state.colour === "labels") {
    const top = data.labels[group][0];
    return top ? classColour(top[0], data.purity[group]) : theme.low;
  }
  const value = ramp.values[group];
  if (value === null) return theme.low;
  return mix(theme.low, theme.link, ramp.high > ramp.low ? (value - ramp.low) / (ramp.high - ramp.low) * 0.9 : 0.5);
}
function setColour(name) {
  state.colour = name;
  if (name !== "labels") {
    const values = measured(name), known = values.filter((value, g) => value !== null && count[g]);
    ramp = { values, low: known.reduce((a, b) => Math.min(a, b), Infinity), high: known.reduce((a, b) => Math.max(a, b), -Infinity) };
  }
  legend();
  redraw();
}
function legend() {
  const box = get("legend");
  box.replaceChildren();
  const patch = (colour, text) => element("span", {}, Object.assign(element("i"), { style: `background:${colour}` }), text);
  if (state.colour === "labels") {
    box.append(...order.slice(0, 24).map((label) => patch(classColour(label), className(label))));
    box.append(order.length > 24 ? `and ${order.length - 24} more` : "muted: less pure");
  } else if (ramp.high >= ramp.low) {
    const bar = element("i", { className: "ramp", style: `background:linear-gradient(to right,${theme.low},${mix(theme.low, theme.link, 0.9)})` });
    box.append(element("span", {}, number(ramp.low), bar, number(ramp.high)), measures[state.colour]);
  }
}

const canvas = get("canvas"), context = canvas.getContext("2d");
// The blocks are drawn once, into `base`. Moving from block to block only copies them and draws an outline.
const base = document.createElement("canvas");
let size = { width: 0, height: 0, row: 0 }, waiting = false, stale = true;
function redraw() {
  stale = true;
  repaint();
}
function repaint() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; paint(); });
}
function paint() {
  if (stale) {
    draw(base.getContext("2d"));
    stale = false;
  }
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.drawImage(base, 0, 0);
  context.setTransform(size.scale, 0, 0, size.scale, 0, 0);
  outline();
}
function resize() {
  const width = get("tree").clientWidth, scale = devicePixelRatio || 1;
  const row = Math.max(20, Math.min(44, Math.round(300 / (depth + 1))));
  size = { width, row, height: row * (depth + 1), scale };
  canvas.width = base.width = Math.round(width * scale);
  canvas.height = base.height = Math.round(size.height * scale);
  canvas.style.height = `${size.height}px`;
  redraw();
}
function across(group) {
  const { start, end } = place[state.width], from = start[state.view], to = end[state.view];
  const scale = size.width / Math.max(to - from, 1e-12);
  const left = Math.max(0, (start[group] - from) * scale), right = Math.min(size.width, (end[group] - from) * scale);
  return [left, Math.max(right, left)];
}
function draw(context) {
  const { width, height, row, scale } = size, named = [];
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  for (let g = 0; g < groups; g++) {
    const [left, right] = across(g);
    if (right - left < 0.05) continue;
    const gap = right - left > 4 ? 1 : 0, top = level(g) * row;
    context.fillStyle = colourOf(g);
    context.fillRect(left, top, Math.max(right - left - gap, 0.5), row - 1);
    if (!count[g] && right - left > 3) {
      context.strokeStyle = theme.line;
      context.strokeRect(left + 0.5, top + 0.5, right - left - 2, row - 2);
    }
    if (right - left > 26) named.push([g, left, right, top]);
  }
  if (state.input !== null) trace(context);
  names(context, named);
}
function names(context, named) {
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.textAlign = "center";
  for (const [g, left, right, top] of named) {
    const long = right - left > 90, label = state.colour === "labels" && data.labels[g][0];
    const name = long ? nameOf(g) : String(isLeaf(g) ? g - nodes : g);
    const text = long && label ? `${name}: ${className(label[0])}` : name;
    const at = [text, (left + right) / 2, top + size.row / 2, right - left - 4];
    if (state.input !== null) {  // the path must not cross the text
      const wide = Math.min(context.measureText(text).width + 4, right - left - 2);
      context.fillStyle = colourOf(g);
      context.fillRect((left + right - wide) / 2, top + size.row / 2 - 8, wide, 16);
    }
    context.fillStyle = theme.ink;
    context.fillText(...at);
  }
}
function outline() {
  const [left, right] = across(state.group), wide = Math.max(right - left, 4);
  const x = Math.min(Math.max(0, (left + right - wide) / 2), size.width - wide);
  context.strokeStyle = theme.page; context.lineWidth = 5;
  context.strokeRect(x + 2, level(state.group) * size.row + 2, wide - 4, size.row - 5);
  context.strokeStyle = theme.ink; context.lineWidth = 2.5;
  context.strokeRect(x + 1.5, level(state.group) * size.row + 1.5, wide - 3, size.row - 4);
  context.lineWidth = 1;
}
function trace(context) {
  context.strokeStyle = theme.path; context.lineWidth = 3; context.lineJoin = "round";
  context.beginPath();
  for (let g = nodes + data.inputs[state.input][2], first = true; ; g = parent(g)) {
    const [left, right] = across(g), x = (left + right) / 2, y = level(g) * size.row + size.row / 2;
    const wanted = Math.min(Math.max(x, 2), size.width - 2);
    if (first) context.moveTo(wanted, y + size.row / 3); else context.lineTo(wanted, y);
    first = false;
    if (!g) break;
  }
  context.stroke();
  context.lineWidth = 1;
}
function hit(x, y) {
  const deep = Math.min(depth, Math.max(0, Math.floor(y / size.row)));
  const { start, end } = place[state.width];
  const at = start[state.view] + x / size.width * (end[state.view] - start[state.view]);
  if (deep < level(state.view)) {
    let up = state.view;
    while (level(up) > deep) up = parent(up);
    return up;
  }
  let group = 0;
  while (level(group) < deep) {
    const right = 2 * group + 2;
    group = at < start[right] || (at === start[right] && end[right] === start[right]) ? right - 1 : right;
  }
  return group;
}
