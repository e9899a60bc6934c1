// After tree.js, in one script with it.

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
