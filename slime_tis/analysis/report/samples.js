"use strict";
// Samples and their tokens, from the bytes that samples.py packs.
let samples = null;
const column = {};
async function unpack(script) {
  const buffer = await inflate(script);
  const length = new DataView(buffer).getUint32(0, true);
  samples = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  for (const [name, [type, start, count]] of Object.entries(samples.columns))
    column[name] = new { Float32Array, Int32Array, Int16Array, Uint8Array }[type](buffer, 4 + length + start, count);
}

const MAX_LISTED_SAMPLES = 300, MAX_SHOWN_TOKENS = 4000;
let shown = [], current = 0, sideBySide = false, wholeSample = -1;

function tokenText(i) {
  if (!column.token) return "token " + i;
  const index = column.token[i];
  return samples.texts ? visible(samples.texts[index]) : String(samples.ids[index]);
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
    const weight = (column.bounded_weight || column.weight)[i];
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
    ratio: [["59,110,165", "less likely in training"], ["192,87,43", "more likely in training"]],
    weight: [["59,110,165", "weight below 1"], ["192,87,43", "above 1"]],
    mask: [["63,143,95", "trained on"], ["192,87,43", "rejected"], ["138,94,168", "vetoed"]],
  };
  byId("legend").replaceChildren(...legends[mode].flatMap(([rgb, text]) => [element("i", { style: `background: rgba(${rgb},.7)` }), text]));
}

// First tokens of the segments: a turn ends, the environment writes, or other weights sample.
function segments(start, end) {
  const key = (at) => [column.turn?.[at], column.mask[at], column.mask[at] ? column.weight_version?.[at] : 0].join();
  const starts = [];
  for (let at = start; at < end; at++) if (at === start || key(at) !== key(at - 1)) starts.push(at);
  return starts;
}

function segmentText(start, end) {
  const parts = column.turn ? [`turn ${column.turn[start]}`] : [];
  if (!column.mask[start]) return [...parts, "tool or environment", "not trained on", `${end - start} tokens`].join(", ");
  parts.push("model");
  if (column.weight_version && column.weight_version[start] >= 0) parts.push(`weights ${column.weight_version[start]}`);
  let size = 0, valid = 0;
  for (let at = start; at < end; at++) if (column.valid[at]) { size += Math.abs(column.ratio[at]); valid++; }
  return [...parts, `${end - start} tokens`, ...(valid ? [`mean abs(Δ) ${number(size / valid)}`] : [])].join(", ");
}

function article(i) {
  const sample = samples.samples[i], start = samples.offsets[i];
  const count = wholeSample === i ? length(i) : Math.min(length(i), MAX_SHOWN_TOKENS);
  const about = [`${length(i)} tokens`, `mean abs(Δ) ${number(sample.mean)}`];
  for (const [key, text] of [["step", "step"], ["group", "group"], ["sample_index", "sample"], ["reward", "reward"], ["advantage", "advantage"]])
    if (sample[key] !== undefined) about.push(`${text} ${number(sample[key])}`);
  if (sample.truncated) about.push("truncated");
  const tokens = element("div", { class: "tokens" + (samples.texts ? "" : " ids") });
  const starts = segments(start, start + length(i));
  const ends = new Map(starts.map((at, k) => [at, starts[k + 1] ?? start + length(i)]));
  for (let at = start; at < start + count; at++) {
    if (ends.size > 1 && ends.has(at)) tokens.append(element("div", { class: "turn" }, segmentText(at, ends.get(at))));
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
  byId("sample").replaceChildren(...(shown.length ? together.slice(0, 16).map(article) : []));
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
  byId("list").replaceChildren(...shown.slice(0, MAX_LISTED_SAMPLES).map((i) => {
    const sample = samples.samples[i];
    let start = "";
    for (let at = samples.offsets[i]; at < Math.min(samples.offsets[i + 1], samples.offsets[i] + 24); at++) start += tokenText(at) + (samples.texts ? "" : " ");
    const about = `abs(Δ) ${number(sample.mean)}` + (sample.reward !== undefined ? ` · reward ${number(sample.reward)}` : "") + (sample.step !== undefined ? ` · step ${sample.step}` : "");
    return element("li", { "data-sample": i, "aria-current": i === current }, element("div", { class: "text" }, start), element("div", { class: "about" }, about));
  }));
  if (shown.length > MAX_LISTED_SAMPLES) byId("list").append(element("li", {}, `${shown.length - MAX_LISTED_SAMPLES} more samples: search, or choose another order`));
  if (!shown.length) byId("list").append(element("li", {}, "no matching samples"));
}

function choose(i) {
  current = i;
  for (const item of byId("list").children) item.setAttribute("aria-current", item.dataset.sample === String(i));
  show();
}

function inspect(token) {
  if (!token) return;
  byId("sample").querySelectorAll(".at").forEach((other) => other.classList.remove("at"));
  token.classList.add("at");
  details(+token.dataset.i);
}

// Arrow keys in the list choose a sample, in the sample a token.
function move(event) {
  const step = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const inList = event.currentTarget.id === "list", items = [...event.currentTarget.querySelectorAll(inList ? "[data-sample]" : "[data-i]")];
  const at = items.findIndex((item) => (inList ? item.getAttribute("aria-current") === "true" : item.classList.contains("at")));
  const item = items[Math.min(Math.max(at + step, 0), items.length - 1)];
  if (!item) return;
  event.preventDefault();
  item.scrollIntoView({ block: "nearest" });
  if (inList) choose(+item.dataset.sample); else inspect(item);
}

function details(i) {
  const parts = [element("b", {}, tokenText(i))];
  const add = (name, value) => parts.push(element("span", {}, element("i", {}, name + " "), value));
  let sample = 0;
  while (samples.offsets[sample + 1] <= i) sample++;
  add("position", String(i - samples.offsets[sample]));
  if (column.token) add("id", String(samples.ids[column.token[i]]));
  if (!column.mask[i]) add("masked", "not trained on; ignore its log-probs");
  else {
    add("log π train", number(column.train[i], 5));
    if (column.old) add("log π old", number(column.old[i], 5));
    add("log π rollout", number(column.rollout[i], 5));
    add("Δ", column.valid[i] ? number(column.ratio[i]) : "not finite");
    if (column.weight) add("weight", number(column.weight[i]));
    if (column.bounded_weight) add("bounded", number(column.bounded_weight[i]));
    if (column.advantage) add("advantage", number(column.advantage[i]));
    if (column.entropy) add("entropy", number(column.entropy[i]));
    if (column.weight_version) add("weight version", String(column.weight_version[i]));
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

function start() {
  if (!column.weight && !column.bounded_weight) byId("color").querySelector("[value=weight]").remove();
  for (const [key, name] of [["reward", "reward"], ["advantage", "advantage"], ["step", "step"]])
    if (samples.samples.every((sample) => sample[key] === undefined)) byId("order").querySelector(`[value=${name}]`).remove();
  if (samples.samples.every((sample) => sample.group === undefined)) byId("side").remove();
  else byId("side").addEventListener("click", () => { sideBySide = !sideBySide; byId("side").setAttribute("aria-pressed", sideBySide); show(); });
  byId("color").addEventListener("change", recolor);
  byId("order").addEventListener("change", list);
  byId("search").addEventListener("input", () => { list(); choose(shown[0]); });
  byId("list").addEventListener("click", (event) => {
    const item = event.target.closest("[data-sample]");
    if (item) choose(+item.dataset.sample);
  });
  byId("sample").addEventListener("mouseover", (event) => inspect(event.target.closest("[data-i]")));
  for (const id of ["list", "sample"]) byId(id).addEventListener("keydown", move);
  list();
  choose(shown[0]);
}

function removeSamples(text) {
  for (const part of [".controls", ".viewer", "#details"]) byId("samples").querySelector(part).remove();
  note(byId("samples"), text);
}

// html[data-samples] is the number of samples.
(async () => {
  try {
    if (byId("tokens").textContent) await unpack(byId("tokens"));
    if (samples && samples.samples.length) start(); else removeSamples("");
  } catch (error) {
    removeSamples("This browser cannot show the samples: " + error);
    console.error(error);
  }
  note(byId("samples"), data.notes.samples);
  document.documentElement.dataset.samples = samples ? samples.samples.length : 0;
})();
