"use strict";
// Draws the plots of page.js with Plotly: visible plots first, the others after the page has loaded.
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
  await Plotly.react(canvas, spec.traces, layout, { displaylogo: false, responsive: true, showSendToCloud: false, plotlyServerURL: "", modeBarButtonsToRemove: ["lasso2d", "select2d"] });
  if (onclick) { canvas.removeAllListeners("plotly_click"); canvas.on("plotly_click", onclick); }
}

const pending = new Set(plots);
let drawing = false, loaded = false;
function nextPlot() {
  const all = [...pending];
  const visible = ([canvas]) => { const box = canvas.getBoundingClientRect(); return box.top < innerHeight && box.bottom > 0; };
  return all.find(visible) ?? (loaded ? all[0] : undefined);
}
// One plot at a time, so that the page stays responsive. html[data-drawn] is set after the last plot.
async function drawAll() {
  if (drawing || !window.Plotly) return;
  drawing = true;
  for (let plot; (plot = nextPlot()); ) {
    pending.delete(plot);
    try { await draw(plot); } catch (error) { console.error(error); }
    await new Promise((resolve) => setTimeout(resolve));
  }
  drawing = false;
  if (!pending.size) document.documentElement.dataset.drawn = plots.length;
}
addEventListener("scroll", drawAll, { passive: true });
addEventListener("load", () => { loaded = true; drawAll(); });
dark.addEventListener("change", () => { plots.forEach((plot) => pending.add(plot)); drawAll(); });

// Plotly is deflated: its 4.8 MB take 1.4 MB of the page.
(async () => {
  const source = await inflate(byId("plotly"));
  const script = element("script", { src: URL.createObjectURL(new Blob([source], { type: "text/javascript" })), onload: drawAll });
  document.head.append(script);
})();
