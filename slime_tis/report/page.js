"use strict";
// Everything that comes from a run is put into the page as text (textContent), never as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  for (const child of children) if (child !== null && child !== undefined) made.append(child);
  return made;
}

// Control characters become their pictures, marks that change the direction of text their code points.
function visible(text) {
  return String(text)
    .replace(/[\u0000-\u0009\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
    .replace(/[\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g,
      (c) => "‹U+" + c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0") + "›");
}

function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  const text = size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(digits - 1) : String(Number(value.toPrecision(digits)));
  return text.replace("-", "−");
}

// Plots
const dark = matchMedia("(prefers-color-scheme: dark)");
function drawn() {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  const axis = { gridcolor: color("--line"), zerolinecolor: color("--line"), linecolor: color("--line"), automargin: true };
  const base = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: color("--fg") },
    margin: { l: 52, r: 12, t: 8, b: 40 }, hovermode: "closest",
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, showlegend: true,
  };
  return (layout) => ({ ...base, ...layout, xaxis: { ...axis, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis } });
}
const plots = [];
function plot(parent, spec, onclick) {
  const canvas = element("div", { class: "canvas", id: "plot-" + spec.id });
  parent.append(element("div", { class: "plot" + (spec.wide ? " wide" : "") },
    element("h3", {}, spec.title), element("p", { class: "says" }, spec.says), canvas));
  plots.push([canvas, spec, onclick]);
}
// One after another, so that the page can be read and scrolled meanwhile; html[data-drawn] says that all are there.
async function drawAll() {
  for (const [canvas, spec, onclick] of plots) {
    await new Promise((next) => setTimeout(next));
    const layout = drawn()(spec.layout);
    layout.showlegend = spec.traces.filter((trace) => trace.showlegend !== false && trace.type !== "heatmap").length > 1;
    await Plotly.react(canvas, spec.traces, layout, { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["lasso2d", "select2d"] });
    if (onclick) { canvas.removeAllListeners("plotly_click"); canvas.on("plotly_click", onclick); }
  }
  document.documentElement.dataset.drawn = plots.length;
}
// Plotly comes after this script, so that text and tables are there before it is read.
addEventListener("load", drawAll);
dark.addEventListener("change", drawAll);

// Tables: columns of {key, title, text?, show?}; a click on a head sorts.
function table(columns, rows, onrow) {
  let sorted = null, rising = false;
  const body = element("tbody");
  const fill = () => body.replaceChildren(...rows.map((row) => {
    const line = element("tr", {}, ...columns.map((column) => element("td", column.text ? { class: "text" } : {},
      column.show ? column.show(row[column.key], row) : column.text ? visible(row[column.key] ?? "") : number(row[column.key]))));
    if (onrow) line.addEventListener("click", () => { for (const other of body.children) other.classList.remove("chosen"); line.classList.add("chosen"); onrow(row); });
    return line;
  }));
  const heads = columns.map((column) => element("th", {
    ...(column.text ? { class: "text" } : {}), title: column.title,
    onclick: () => {
      rising = sorted === column.key ? !rising : false; sorted = column.key;
      const value = (row) => row[sorted] ?? (column.text ? "" : -Infinity);
      rows = [...rows].sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (rising ? 1 : -1));
      fill();
    },
  }, column.title));
  fill();
  return element("div", { class: "scroll" }, element("table", {}, element("thead", {}, element("tr", {}, ...heads)), body));
}

function note(parent, text) { if (text) parent.append(element("p", { class: "note" }, visible(text))); }

// Head, diagnosis, overview, shape
byId("title").textContent = visible(data.title);
byId("subtitle").textContent = visible(data.subtitle);
for (const run of data.diagnoses) {
  if (data.diagnoses.length > 1) byId("findings").append(element("h3", {}, visible(run.name)));
  run.findings.forEach((finding, place) => byId("findings").append(element("div", {
    class: "finding" + (finding.cause === "healthy" ? " healthy" : place === 0 ? " first" : ""), "data-cause": finding.cause },
    element("h3", {}, `${place + 1}. ${visible(finding.title)}`),
    element("p", {}, `confidence ${Math.round(100 * finding.confidence)} %, ${Math.round(100 * finding.share)} % of the mismatch`),
    element("ul", {}, ...finding.evidence.map((text) => element("li", {}, visible(text)))),
    element("p", {}, visible(finding.fix)))));
}
for (const [name, id] of [["overview", "overview"], ["shape", "shape"]]) {
  note(byId(id + "-plots").parentNode, data.notes[name]);
  data[name].forEach((spec) => plot(byId(id + "-plots"), spec));
}
if (data.warnings.length) byId("warnings").append(table([
  { key: "step", title: "first step" }, { key: "last", title: "last step" }, { key: "name", title: "warning", text: true },
  { key: "message", title: "message", text: true }], data.warnings));
data.facts.forEach((fact) => byId("facts").append(element("div", {}, element("b", {}, visible(fact.value)), element("span", {}, visible(fact.name)))));
if (data.worst.length) byId("worst-tokens").append(element("h3", {}, "Worst tokens"),
  element("p", { class: "says" }, "Token ids of the largest mean abs(Δ), among those that occur at least three times."),
  table([{ key: "text", title: "token", text: true }, { key: "token", title: "id" }, { key: "count", title: "tokens" },
    { key: "mean", title: "mean abs(Δ)" }, { key: "max", title: "largest" }], data.worst));

// Samples
const samples = data.samples;
const column = {};
if (samples) {
  const unpacked = (packed) => {
    const text = atob(packed.bytes), bytes = new Uint8Array(text.length);
    for (let i = 0; i < bytes.length; i++) bytes[i] = text.charCodeAt(i);
    return new { Float32Array, Int32Array, Int16Array, Uint8Array }[packed.type](bytes.buffer);
  };
  for (const [name, packed] of Object.entries(samples.columns)) column[name] = unpacked(packed);
  if (samples.experts) column.experts = unpacked(samples.experts.ids);
}
const MOST_LISTED = 300, MOST_TOKENS = 4000;
let shown = [], current = 0, sideBySide = false, wholeSample = -1;

function tokenText(i) {
  if (!column.token) return "token " + i;
  const place = column.token[i];
  return samples.texts ? visible(samples.texts[place]) : String(samples.ids[place]);
}
const length = (i) => samples.offsets[i + 1] - samples.offsets[i];

function background(i, mode) {
  if (!column.mask[i]) return "";
  const tint = (rgb, share) => `rgba(${rgb},${Math.min(0.85, Math.max(0, share)).toFixed(3)})`;
  if (mode === "mask") {
    if (column.vetoed && column.vetoed[i]) return tint("138,94,168", 0.6);
    if (column.rejected && column.rejected[i]) return tint("192,87,43", 0.6);
    return tint("63,143,95", 0.25);
  }
  if (mode === "weight") {
    const weight = (column.bounded || column.weight)[i];
    const log = Math.log(Math.max(weight, 1e-9));
    return tint(log < 0 ? "59,110,165" : "192,87,43", Math.abs(log) / Math.log(2));
  }
  if (!column.valid[i]) return "";
  return tint(column.ratio[i] < 0 ? "59,110,165" : "192,87,43", 0.85 * Math.abs(column.ratio[i]) / Math.max(samples.scale, 1e-6));
}

function recolor() {
  const mode = byId("color").value;
  for (const token of document.querySelectorAll("#sample .tokens span")) token.style.background = background(+token.dataset.i, mode);
  const legends = {
    ratio: [["59,110,165", "training finds it less likely"], ["192,87,43", "likelier"]],
    weight: [["59,110,165", "weight below 1"], ["192,87,43", "above 1"]],
    mask: [["63,143,95", "trained on"], ["192,87,43", "rejected"], ["138,94,168", "vetoed"]],
  };
  byId("legend").replaceChildren(...legends[mode].flatMap(([rgb, text]) => [element("i", { style: `background: rgba(${rgb},.7)` }), text]));
}

function article(i) {
  const sample = samples.samples[i], start = samples.offsets[i];
  const count = wholeSample === i ? length(i) : Math.min(length(i), MOST_TOKENS);
  const about = [`${length(i)} tokens`, `mean abs(Δ) ${number(sample.mean)}`];
  for (const [key, text] of [["step", "step"], ["group", "group"], ["sample_index", "sample"], ["reward", "reward"], ["advantage", "advantage"]])
    if (sample[key] !== undefined) about.push(`${text} ${number(sample[key])}`);
  if (sample.truncated) about.push("truncated");
  const tokens = element("div", { class: "tokens" + (samples.texts ? "" : " ids") });
  for (let at = start; at < start + count; at++) {
    const kind = !column.mask[at] ? "masked" : column.valid[at] ? "" : "missing";
    tokens.append(element("span", { "data-i": at, ...(kind ? { class: kind } : {}) }, tokenText(at)));
  }
  const more = count < length(i) ? element("button", { type: "button", onclick: () => { wholeSample = i; show(); } }, `All ${length(i)} tokens`) : null;
  const text = !samples.texts && sample.text ? element("div", { class: "prompt" }, visible(sample.text)) : null;
  return element("article", {}, element("p", { class: "about" }, about.join(" · ")),
    sample.prompt ? element("div", { class: "prompt" }, visible(sample.prompt)) : null, text, tokens, more);
}

function show() {
  const group = samples.samples[current]?.group;
  const step = samples.samples[current]?.step;
  const together = sideBySide && group !== undefined
    ? samples.samples.map((_, i) => i).filter((i) => samples.samples[i].group === group && samples.samples[i].step === step) : [current];
  byId("sample").replaceChildren(...(samples.samples.length ? together.slice(0, 16).map(article) : []));
  recolor();
}

function matches(i, query) {
  const wanted = /^(step|group|sample)\s+(\d+)$/.exec(query);
  const sample = samples.samples[i];
  if (wanted) return sample[wanted[1] === "sample" ? "sample_index" : wanted[1]] === +wanted[2];
  if ((sample.text + "\n" + sample.prompt).toLowerCase().includes(query)) return true;
  let response = "";
  for (let at = samples.offsets[i]; at < samples.offsets[i + 1]; at++) {
    if (column.token && String(samples.ids[column.token[at]]) === query) return true;
    if (samples.texts) response += samples.texts[column.token[at]];
  }
  return response.toLowerCase().includes(query);
}

function list() {
  const query = byId("search").value.trim().toLowerCase(), order = byId("order").value;
  const key = (i) => (order === "length" ? length(i) : samples.samples[i][order] ?? -Infinity);
  shown = samples.samples.map((_, i) => i).filter((i) => !query || matches(i, query));
  shown.sort((a, b) => key(b) - key(a));
  byId("list").replaceChildren(...shown.slice(0, MOST_LISTED).map((i) => {
    const sample = samples.samples[i];
    let start = "";
    for (let at = samples.offsets[i]; at < Math.min(samples.offsets[i + 1], samples.offsets[i] + 24); at++) start += tokenText(at) + (samples.texts ? "" : " ");
    const about = `abs(Δ) ${number(sample.mean)}` + (sample.reward !== undefined ? ` · reward ${number(sample.reward)}` : "") + (sample.step !== undefined ? ` · step ${sample.step}` : "");
    return element("li", { "data-sample": i, "aria-current": i === current }, element("div", { class: "text" }, start), element("div", { class: "about" }, about));
  }));
  if (shown.length > MOST_LISTED) byId("list").append(element("li", {}, `${shown.length - MOST_LISTED} more: search, or order them otherwise`));
  if (!shown.length) byId("list").append(element("li", {}, "no sample contains this"));
}

function details(i) {
  const parts = [element("b", {}, tokenText(i))];
  const add = (name, value) => parts.push(element("span", {}, element("i", {}, name + " "), value));
  let sample = 0;
  while (samples.offsets[sample + 1] <= i) sample++;
  add("position", String(i - samples.offsets[sample]));
  if (column.token) add("id", String(samples.ids[column.token[i]]));
  if (!column.mask[i]) add("masked", "not trained on; its log-probs mean nothing");
  else {
    add("log π train", number(column.train[i], 5));
    if (column.old) add("log π old", number(column.old[i], 5));
    add("log π rollout", number(column.rollout[i], 5));
    add("Δ", column.valid[i] ? number(column.ratio[i]) : "not finite");
    if (column.weight) add("weight", number(column.weight[i]));
    if (column.bounded) add("bounded", number(column.bounded[i]));
    if (column.advantage) add("advantage", number(column.advantage[i]));
    if (column.entropy) add("entropy", number(column.entropy[i]));
    if (column.weight_version) add("weights", String(column.weight_version[i]));
    if (column.turn) add("turn", String(column.turn[i]));
    if (column.rejected && column.rejected[i]) add("rejected by", samples.criteria.filter((_, bit) => column.rejected[i] >> bit & 1).map(visible).join(", ") || "a criterion");
    if (column.vetoed && column.vetoed[i]) add("vetoed", "its sequence");
  }
  if (column.experts) {
    const { layers, of, k } = samples.experts, from = i * layers * k;
    const rows = Array.from({ length: layers }, (_, layer) => Array.from(column.experts.subarray(from + layer * k, from + (layer + 1) * k)).join("+"));
    add(`experts of ${layers} of ${of} layers`, rows.slice(0, 48).join(" "));
  }
  byId("details").replaceChildren(...parts);
}

if (samples && samples.samples.length) {
  if (!column.weight && !column.bounded) byId("color").querySelector("[value=weight]").remove();
  for (const [key, name] of [["reward", "reward"], ["advantage", "advantage"], ["step", "step"]])
    if (samples.samples.every((sample) => sample[key] === undefined)) byId("order").querySelector(`[value=${name}]`).remove();
  if (samples.samples.every((sample) => sample.group === undefined)) byId("side").remove();
  else byId("side").addEventListener("click", () => { sideBySide = !sideBySide; byId("side").setAttribute("aria-pressed", sideBySide); show(); });
  byId("color").addEventListener("change", recolor);
  byId("order").addEventListener("change", list);
  byId("search").addEventListener("input", list);
  byId("list").addEventListener("click", (event) => {
    const item = event.target.closest("[data-sample]");
    if (!item) return;
    current = +item.dataset.sample;
    for (const other of byId("list").children) other.setAttribute("aria-current", other === item);
    show();
  });
  byId("sample").addEventListener("mouseover", (event) => {
    const token = event.target.closest("[data-i]");
    if (!token) return;
    byId("sample").querySelectorAll(".at").forEach((other) => other.classList.remove("at"));
    token.classList.add("at");
    details(+token.dataset.i);
  });
  list();
  current = shown[0];
  list();
  show();
  note(byId("samples"), data.notes.samples);
} else {
  byId("samples").querySelector(".controls").remove();
  byId("samples").querySelector(".viewer").remove();
  byId("details").remove();
  note(byId("samples"), data.notes.samples);
}

// What if
function flags(row) {
  let box = byId("flags");
  if (!box) { box = element("div", { class: "flags", id: "flags" }); byId("what-if-table").append(box); }
  const code = element("code", {}, visible(row.flags));
  const copy = element("button", { type: "button", onclick: async () => {
    getSelection().selectAllChildren(code);
    try { await navigator.clipboard.writeText(row.flags); copy.textContent = "copied"; } catch { copy.textContent = "selected"; }
  } }, "Copy");
  box.replaceChildren(element("span", {}, visible(row.name)), code, copy);
}
if (data.what_if.rows.length) {
  data.what_if.plots.forEach((spec) => plot(byId("what-if-plots"), spec, (event) => {
    const row = data.what_if.rows[event.points[0].customdata];
    if (row) flags(row);
  }));
  byId("what-if-table").append(table(data.what_if.columns, data.what_if.rows, flags));
}
note(byId("what-if"), data.notes.what_if);
