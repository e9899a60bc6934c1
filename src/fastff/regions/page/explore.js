"use strict";
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

// ---- the selected region
function select(group, tell = true) {
  state.group = group;
  if (!inside(group)) {
    state.view = 0;
    stale = true;
  }
  repaint();
  region();
  examples();
  const item = get("item"), spot = level(group), name = capital(nameOf(group));
  const top = data.labels && data.labels[group][0];
  const said = `${name}, ${whole(count[group])} of ${whole(samples)} inputs` + (top ? `, mostly ${className(top[0])}` : "");
  item.textContent = said;
  item.setAttribute("aria-label", said);
  item.setAttribute("aria-level", spot + 1);
  item.setAttribute("aria-setsize", spot ? 2 : 1);
  item.setAttribute("aria-posinset", spot ? 2 - (group & 1) : 1);
  if (isLeaf(group)) item.removeAttribute("aria-expanded"); else item.setAttribute("aria-expanded", "true");
  get("zoom").textContent = state.view && state.view === group ? "Whole tree" : "Zoom in";
  get("zoom").disabled = isLeaf(group) && !state.view;
  if (tell) {
    get("announce").textContent = said;
    clearTimeout(later);
    later = setTimeout(remember, 250);
  }
}
let later = 0;  // browsers refuse more than a few changes of the address a second
function remember() {
  try { history.replaceState(null, "", `#${nameOf(state.group).replace(" ", "-")}`); } catch { /* a page in a sandbox */ }
}
function inside(group) {
  while (group > state.view) group = parent(group);
  return group === state.view;
}
function goButton(group, text = nameOf(group)) {
  return element("button", { type: "button", onclick: () => select(group) }, text);
}
function region() {
  const g = state.group, path = [];
  for (let up = g; ; up = parent(up)) { path.unshift(up); if (!up) break; }
  get("crumbs").replaceChildren(...path.map((at, i) => {
    const turn = i < path.length - 1 ? (path[i + 1] % 2 ? "left ›" : "right ›") : null;
    const button = goButton(at);
    if (at === g) button.setAttribute("aria-current", "location");
    return element("li", {}, button, turn);
  }));
  get("name").textContent = capital(nameOf(g));
  const fair = samples / 2 ** level(g);
  const state_ = !count[g] ? "Dead: no input arrives." : isLeaf(g) && data.overloaded.includes(g - nodes) ? "Overloaded." : "";
  get("line").textContent = `${state_} ${isLeaf(g) ? "" : `Sends ${whole(count[2 * g + 1])} left, ${whole(count[2 * g + 2])} right.`}`.trim();
  const facts = { inputs: `${whole(count[g])} of ${whole(samples)} (${percent(count[g] / samples)}, ${number(count[g] / fair)} × fair share)` };
  if (data.accuracy) facts.accuracy = data.accuracy[g] === null ? "-" : percent(data.accuracy[g]);
  if (data.purity) facts.purity = data.purity[g] === null ? "-" : percent(data.purity[g]);
  if (data.loss) facts.loss = number(data.loss[g]);
  if (data.target) facts["mean target"] = number(data.target[g]);
  facts[isLeaf(g) ? "mean entropy of its path" : "mean entropy"] = `${number(data.entropy[g])} nats`;
  const what = data.distance ? "margin" : "logit";
  facts[`mean ${what}`] = `${number(data.margin[g])} ${isLeaf(g) ? "to the nearest boundary" : "to its boundary"}`;
  get("numbers").replaceChildren(...Object.entries(facts).flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
  get("bars").replaceChildren();
  if (data.labels) get("bars").append(bars("Labels", data.labels[g], className));
  if (data.tokens) get("bars").append(bars("Tokens", data.tokens[g], tokenName));
}
function bars(title, pairs, name) {
  if (!pairs.length) return element("p", { className: "soft" }, `${title}: none.`);
  const sum = pairs.reduce((total, pair) => total + pair[1], 0), most = Math.max(...pairs.map((pair) => pair[1]));
  const body = element("tbody", {}, ...pairs.map(([value, n]) => {
    const meter = element("span", { className: "meter", style: `width:${(100 * n / most).toFixed(1)}%` });
    if (title === "Labels" && value !== -1) meter.style.background = classColour(value);
    return element("tr", {}, element("th", { scope: "row" }, name(value)), element("td", { className: "wide" }, meter),
      element("td", { className: "number" }, `${whole(n)}`), element("td", { className: "number" }, percent(n / sum)));
  }));
  return element("div", { className: "scroll" }, element("table", {}, element("caption", {}, title), body));
}

// ---- examples and the path of one
function examples() {
  const box = get("examples");
  box.className = data.content;
  box.replaceChildren();
  let any = false;
  for (const [kind, by] of Object.entries(data.examples)) {
    const found = by[state.group];
    if (!found || !found.length) continue;
    any = true;
    const about = kind === "boundary" && !isLeaf(state.group) ? "nearest to this node's boundary" : data.kinds[kind];
    const heading = element("h3", {}, `${capital(kind)} `, element("small", {}, about));
    box.append(element("div", {}, heading, data.content === "row" ? rows(found, kind) : cards(found, kind)));
  }
  if (!any) box.append(element("p", { className: "soft" }, count[state.group] ? "No examples are kept." : "No input arrives here."));
}
function followButton(i, ...children) {
  const button = element("button", { type: "button", onclick: () => follow(i) }, ...children);
  button.setAttribute("aria-pressed", String(state.input === i));
  button.dataset.input = i;
  return button;
}
const given = data.inputs.length - data.followed;  // inputs from here on were given to be followed
const title = (i) => `${i < given ? "" : "given "}#${data.inputs[i][0]}` + (data.content === "text" ? ` @${data.inputs[i][1]}` : "");
function verdict(i) {
  const [, , , , label, prediction, , target] = data.inputs[i], parts = [];
  if (label !== null) parts.push(className(label));
  if (target !== null) parts.push(`target ${number(target)}`);
  if (prediction !== null && label !== null && prediction !== label) parts.push(element("span", { className: "wrong" }, `predicted ${className(prediction)}`));
  return parts.flatMap((part) => [" · ", part]);
}
const lossText = (i) => (data.inputs[i][6] === null ? "" : `loss ${number(data.inputs[i][6])}`);
function marginOf(i) {
  const margins = data.inputs[i][3];
  const at = isLeaf(state.group) ? null : level(state.group);
  const known = margins.filter((value) => value !== null);
  return at !== null && at < margins.length ? margins[at] : known.length ? Math.min(...known) : null;
}
function picture(i) {
  const content = data.inputs[i][8];
  if (content === null) return null;
  if (data.content === "text") {
    const [offset, ...words] = content;
    return element("q", {}, words.slice(0, offset).join(""), element("mark", {}, words[offset]), words.slice(offset + 1).join(""));
  }
  if (data.content !== "image") return null;
  const [height, width, channels] = data.shape, bytes = atob(content);
  const image = new ImageData(width, height);
  for (let p = 0; p < width * height; p++) {
    for (let c = 0; c < 3; c++) image.data[4 * p + c] = bytes.charCodeAt(channels * p + (channels === 3 ? c : 0));
    image.data[4 * p + 3] = 255;
  }
  const drawn = element("canvas", { width, height, role: "img" });
  drawn.setAttribute("aria-label", `input ${title(i)}`);
  drawn.getContext("2d").putImageData(image, 0, 0);
  return drawn;
}
const marginText = (i) => `${data.distance ? "margin" : "logit"} ${number(marginOf(i))}`;
function cards(found, kind) {
  return element("div", { className: `grid ${data.content}`, role: "group", "aria-label": `${kind} examples` }, ...found.map((i) =>
    followButton(i, picture(i), element("small", {}, title(i), ...verdict(i)), ...[lossText(i), marginText(i)].filter(Boolean).map((text) => element("small", {}, text)))));
}
function rows(found, kind) {
  const head = element("tr", {}, ...["input", "", "margin", ...data.features].map((name) => element("th", { scope: "col" }, name)));
  const body = found.map((i) => element("tr", {}, element("th", { scope: "row" }, followButton(i, title(i))), element("td", {}, ...verdict(i).slice(1)),
    element("td", { className: "number" }, number(marginOf(i))),
    ...(data.inputs[i][8] ?? []).map((value) => element("td", { className: "number" }, number(value)))));
  return element("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": `${kind} examples` }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
}
function follow(i) {
  state.input = i;
  for (const button of document.querySelectorAll("button[data-input]")) button.setAttribute("aria-pressed", String(Number(button.dataset.input) === i));
  const [, , leaf, margins] = data.inputs[i], known = margins.filter((value) => value !== null);
  const nearest = Math.min(...known), most = Math.max(...known, 1e-12), body = [];
  for (let m = 0, g = 0; m < depth; m++) {
    const right = (leaf >> (depth - 1 - m)) & 1, value = margins[m];
    const meter = element("span", { className: "meter", style: `width:${value === null ? 0 : (100 * value / most).toFixed(1)}%` });
    body.push(element("tr", { className: value === nearest ? "near" : "" }, element("td", {}, goButton(g)), element("td", {}, right ? "right" : "left"),
      element("td", { className: "wide" }, meter), element("td", { className: "number" }, value === null ? "no boundary" : number(value))));
    g = 2 * g + 1 + right;
  }
  const head = element("tr", {}, ...["node", "goes", data.distance ? "distance to its boundary" : "size of its logit"].map((name, k) => element("th", { scope: "col", colSpan: k < 2 ? 1 : 2 }, name)));
  const table = element("table", {}, element("caption", {}, known.length ? `Smallest: ${number(nearest)}, ${data.distance ? "the distance to the nearest boundary of its region" : "its least certain decision"}.` : ""),
    element("thead", {}, head), element("tbody", {}, ...body));
  const end = element("p", {}, "Ends in ", goButton(nodes + leaf), ".");
  get("follow-title").textContent = `Input ${title(i)}`;
  get("path").replaceChildren(...[picture(i), element("p", { className: "soft" }, marginText(i), lossText(i) && ` · ${lossText(i)}`, ...verdict(i)), element("div", { className: "scroll" }, table), end].filter(Boolean));
  get("announce").textContent = `Input ${title(i)} ends in leaf ${leaf}, smallest margin ${number(nearest)}`;
  redraw();
}

// ---- overview, search, keys
function overview() {
  const used = leaves - data.dead.length;
  const facts = [[whole(samples), data.tokens ? "tokens" : "inputs"], [`${whole(used)} of ${whole(leaves)}`, "leaves in use"],
    [number(data.effective), "effective leaves"], [whole(data.dead.length), "dead leaves"], [whole(data.overloaded.length), "overloaded leaves"]];
  if (data.accuracy && data.accuracy[0] !== null) facts.push([percent(data.accuracy[0]), "accuracy"]);
  if (data.loss) facts.push([number(data.loss[0]), "mean loss"]);
  get("cards").append(...facts.map(([value, what]) => element("div", { className: "card" }, element("p", { className: "number" }, value), element("p", { className: "soft" }, what))));
  get("findings").append(...data.findings.map((one) => element("div", { className: "card finding" }, element("strong", {}, capital(one.problem)),
    element("p", {}, `${capital(one.evidence)} ${one.remedy}`), element("p", {}, "Setting: ", element("code", {}, one.setting)))));
  get("about").textContent = data.about;
  const list = (title, found, empty) => {
    const box = element("div", { className: "chips" });
    const show = (from, to) => box.append(...found.slice(from, to).map((leaf) => goButton(nodes + leaf, `leaf ${leaf} (${whole(count[nodes + leaf])})`)));
    show(0, 40);
    if (found.length > 40) {
      const more = element("button", { type: "button", onclick: () => { more.remove(); show(40); } }, `show ${found.length - 40} more`);
      box.append(more);
    }
    return [element("h3", {}, `${title}: ${found.length}`), found.length ? box : element("p", { className: "soft" }, empty)];
  };
  get("leaves").append(...list("Dead", data.dead, "Every leaf has an input."),
    ...list("Overloaded, over 3 × the fair share", data.overloaded, "No leaf has more than three times its fair share."));
}
function search(text) {
  const match = /^\s*(leaf|node|input|given|root|#)?\s*#?(\d+)?\s*$/i.exec(text), kind = (match?.[1] ?? "leaf").toLowerCase();
  if (kind === "root") return [0, ""];
  if (!match || match[2] === undefined) return [null, "Type leaf 5, node 3, input 12 or root."];
  const n = Number(match[2]);
  if (kind === "input" || kind === "#" || kind === "given") {
    const i = data.inputs.findIndex((one, at) => one[0] === n && (kind === "given" ? at >= given : at < given));
    if (i < 0) return [null, kind === "given" ? `There is no given input ${n}.` : `Input ${n} is not among the examples.`];
    follow(i);
    return [nodes + data.inputs[i][2], `Input ${n} ends in leaf ${data.inputs[i][2]}.`];
  }
  if (kind === "leaf") return n < leaves ? [nodes + n, ""] : [null, `There is no leaf ${n}: leaves are 0 to ${leaves - 1}.`];
  return n < nodes ? [n, ""] : [null, `There is no node ${n}: ${nodes ? `nodes are 0 to ${nodes - 1}` : "this tree has none"}.`];
}
function fuller(group) {
  const left = 2 * group + 1;
  return count[left + 1] > count[left] ? left + 1 : left;
}
function moved(key, g) {
  const first = 2 ** level(g) - 1;
  if (key === "ArrowUp") return g ? parent(g) : g;
  if (key === "ArrowDown") return isLeaf(g) ? g : fuller(g);
  if (key === "ArrowLeft") return Math.max(first, g - 1);
  if (key === "ArrowRight") return Math.min(2 * first, g + 1);
  if (key === "Home") return 0;
  return null;
}
function zoom() {
  state.view = state.view && state.view === state.group ? 0 : isLeaf(state.group) ? (state.view ? 0 : parent(state.group)) : state.group;
  stale = true;
  select(state.group, false);
}
get("tree").addEventListener("click", (event) => {
  const box = canvas.getBoundingClientRect();
  select(hit(event.clientX - box.left, event.clientY - box.top));
});
get("tree").addEventListener("dblclick", zoom);
get("tree").addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.key === "Enter" || event.key === " ") zoom();
  else {
    const group = moved(event.key, state.group);
    if (group === null) return;
    select(group);
  }
  event.preventDefault();
});
get("search").addEventListener("submit", (event) => {
  event.preventDefault();
  const [group, answer] = search(get("query").value);
  if (group !== null) select(group);
  get("answer").textContent = answer;
});
get("zoom").addEventListener("click", zoom);
get("width").addEventListener("change", (event) => { state.width = event.target.value; redraw(); });
const chooser = get("colour");
for (const [name, text] of Object.entries(measures)) if (text) chooser.append(element("option", { value: name }, text));
chooser.addEventListener("change", () => setColour(chooser.value));
function fromHash() {
  const [group] = location.hash ? search(decodeURIComponent(location.hash.slice(1)).replace("-", " ")) : [null];
  return group;
}
addEventListener("hashchange", () => { const group = fromHash(); if (group !== null) select(group, false); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readTheme(); legend(); region(); redraw(); });
new ResizeObserver(resize).observe(get("tree"));
readTheme();
overview();
setColour(chooser.value);
resize();
get("path").append(element("p", { className: "soft" }, "Choose an example below to see its path through the tree, and its distance to each boundary."));
for (let i = given; i < data.inputs.length; i++) get("given").append(followButton(i, title(i)));
select(fromHash() ?? 0, false);
