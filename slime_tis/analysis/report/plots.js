"use strict";
// Draws the plots of page.js with Plotly: those in view at once, the others when they come into view or the page is loaded.
const dark = matchMedia("(prefers-color-scheme: dark)");
function themed(layout) {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  const axis = { gridcolor: color("--line"), zerolinecolor: color("--line"), linecolor: color("--line"), automargin: true };
  const base = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: color("--fg") },
    margin: { l: 52, r: 12, t: 8, b: 40 }, hovermode: "closest",
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, showlegend: true,
  };
  return { ...base, ...layout, xaxis: { ...axis, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis } };
}

async function draw([canvas, spec, onclick]) {
  const layout = themed(spec.layout);
  layout.showlegend = spec.traces.filter((trace) => trace.showlegend !== false).length > 1;
  await Plotly.react(canvas, spec.traces, layout, { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["lasso2d", "select2d", "sendChartToCloud"] });
  if (onclick) { canvas.removeAllListeners("plotly_click"); canvas.on("plotly_click", onclick); }
}

const undrawn = new Set(plots);
let drawing = false, loaded = false;
function next() {
  const all = [...undrawn];
  const inView = ([canvas]) => { const box = canvas.getBoundingClientRect(); return box.top < innerHeight && box.bottom > 0; };
  return all.find(inView) ?? (loaded ? all[0] : undefined);
}
// One after another, so that the page can be read and scrolled meanwhile; html[data-drawn] says that all are there.
async function drawAll() {
  if (drawing) return;
  drawing = true;
  for (let one; (one = next()); ) {
    undrawn.delete(one);
    try { await draw(one); } catch (error) { console.error(error); }
    await new Promise((done) => setTimeout(done));
  }
  drawing = false;
  if (!undrawn.size) document.documentElement.dataset.drawn = plots.length;
}
drawAll();
addEventListener("scroll", drawAll, { passive: true });
addEventListener("load", () => { loaded = true; drawAll(); });
dark.addEventListener("change", () => { plots.forEach((one) => undrawn.add(one)); drawAll(); });
