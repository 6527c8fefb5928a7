"use strict";
// All values from a run enter the page as text (textContent), never as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function element(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  for (const child of children) if (child !== null && child !== undefined) node.append(child);
  return node;
}

// The bytes of a script element that holds base64 of zlib data. Removes the element.
async function inflate(script) {
  const packed = atob(script.textContent), bytes = new Uint8Array(packed.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = packed.charCodeAt(i);
  script.remove();
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
}

// Shows control characters as pictures (␀), and marks that change the text direction as code points.
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
  if (Number.isInteger(value) && size >= 1000) return value.toLocaleString("en-US").replace("-", "−");
  const text = size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(digits - 1) : String(Number(value.toPrecision(digits)));
  return text.replace("-", "−");
}

// Plots for plots.js: [element, traces and layout, click listener].
const plots = [];
function plot(parent, spec, onclick) {
  const canvas = element("div", { class: "canvas", id: "plot-" + spec.id });
  parent.append(element("div", { class: "plot" + (spec.wide ? " wide" : "") },
    element("h3", {}, spec.title), element("p", { class: "says" }, spec.says), canvas));
  plots.push([canvas, spec, onclick]);
}

// A table with columns {key, title, text?, show?}; a click on a heading sorts.
function table(columns, rows, onrow) {
  let sorted = null, rising = false;
  const body = element("tbody");
  const fill = () => body.replaceChildren(...rows.map((row) => {
    const line = element("tr", onrow ? { tabindex: 0 } : {}, ...columns.map((column) => element("td", column.text ? { class: "text" } : {},
      column.show ? column.show(row[column.key], row) : column.text ? visible(row[column.key] ?? "") : number(row[column.key]))));
    if (onrow) line.addEventListener("click", () => { for (const other of body.children) other.classList.remove("chosen"); line.classList.add("chosen"); onrow(row); });
    return line;
  }));
  const heads = columns.map((column) => element("th", {
    ...(column.text ? { class: "text" } : {}), title: column.says ?? column.title, tabindex: 0,
    onclick: () => {
      rising = sorted === column.key ? !rising : false; sorted = column.key;
      heads.forEach((head, index) => head.setAttribute("aria-sort", columns[index] !== column ? "none" : rising ? "ascending" : "descending"));
      const value = (row) => row[sorted] ?? (column.text ? "" : -Infinity);
      rows = [...rows].sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (rising ? 1 : -1));
      fill();
    },
  }, column.title));
  fill();
  const onkeydown = (event) => { if (event.key === "Enter") event.target.click(); };
  return element("div", { class: "scroll" }, element("table", { onkeydown }, element("thead", {}, element("tr", {}, ...heads)), body));
}

function note(parent, text) { if (text) parent.append(element("p", { class: "note" }, visible(text))); }

// Head, diagnosis, overview, shape
byId("title").textContent = visible(data.title);
byId("subtitle").textContent = data.subtitle.map(visible).join("\n");
if (data.recommendation) {
  byId("recommendation").append(element("h3", {}, "Recommended correction"), element("pre", {}, visible(data.recommendation)));
}
if (data.verdict) {
  byId("verdict").append(element("p", {}, visible(data.verdict.sentence)));
  if (data.verdict.plot) plot(byId("verdict"), data.verdict.plot);
}
for (const run of data.diagnoses) {
  if (data.diagnoses.length > 1) byId("findings").append(element("h3", {}, visible(run.name)));
  run.findings.forEach((finding, index) => byId("findings").append(element("div", {
    class: "finding" + (finding.cause === "healthy" ? " healthy" : index === 0 ? " first" : ""), "data-cause": finding.cause },
    element("h3", {}, `${index + 1}. ${visible(finding.title)}`),
    ...(finding.certainty ? [element("p", {}, visible(finding.certainty))] : []),
    element("ul", {}, ...finding.evidence.map((text) => element("li", {}, visible(text)))),
    element("p", {}, visible(finding.fix)))));
  note(byId("findings"), run.note);
}
for (const [name, id] of [["overview", "overview"], ["shape", "shape"]]) {
  note(byId(id + "-plots").parentNode, data.notes[name]);
  data[name].forEach((spec) => plot(byId(id + "-plots"), spec));
}
if (data.warnings.length) byId("warnings").append(table([
  { key: "step", title: "first step" }, { key: "last", title: "last step" }, { key: "name", title: "warning", text: true },
  { key: "message", title: "message", text: true }], data.warnings));
for (const { name, facts } of data.facts) {
  if (!facts.length) continue;
  if (data.facts.length > 1) byId("facts").append(element("h3", {}, visible(name)));
  byId("facts").append(element("div", { class: "facts" }, ...facts.map((fact) =>
    element("div", {}, element("b", {}, visible(fact.value)), element("span", {}, visible(fact.name))))));
}
if (data.worst.length) byId("worst-tokens").append(element("h3", {}, "Worst tokens"),
  element("p", { class: "says" }, "Token ids with the largest mean abs(Δ) among ids that occur at least three times."),
  table([{ key: "text", title: "token", text: true, show: (text) => visible(text).replace(/ /g, "␣").replace(/\n/g, "␊") || "–" }, { key: "token", title: "id" }, { key: "count", title: "tokens" },
    { key: "mean", title: "mean abs(Δ)" }, { key: "max", title: "largest" }], data.worst));

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
  byId("what-if-table").append(
    element("p", { class: "says" }, data.what_if.columns.filter((column) => column.says).map((column) => `${column.title}: ${column.says}`).join(". ") + "."),
    table(data.what_if.columns, data.what_if.rows, flags));
  flags(data.what_if.rows[0]);
}
if (data.notes.what_if) byId("what-if").querySelector(".says").after(element("p", { id: "advice" }, visible(data.notes.what_if)));
