// Line charts over the steps: one for each series, with marks at values that are not finite and a cursor.

const CONFIG = { displayModeBar: false, responsive: true, doubleClick: "reset" };
const cursors = new Set();

function baseLayout(margin) {
  return {
    margin, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
    font: { family: "system-ui, sans-serif", size: 11, color: color("muted") },
    hoverlabel: { font: { size: 12 } }, dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
  };
}

function axis(more = {}) {
  return { gridcolor: color("grid"), zeroline: false, linecolor: color("line"), fixedrange: true, ...more };
}

// Integer powers of ten within a range of logarithms, at most `most` of them.
function powers(low, high, most) {
  const first = Math.ceil(low), count = Math.floor(high) - first + 1;
  const every = Math.max(1, Math.ceil(count / most));
  return Array.from({ length: Math.max(0, Math.ceil(count / every)) }, (_, i) => first + i * every);
}

const power = (z) => (z === 0 ? "1" : z === 1 ? "10" : `10<sup>${String(z).replace("-", "\u2212")}</sup>`);

// The horizontal pixel of `x` in a drawn chart.
function pixel(plot, x) {
  const { xaxis } = plot._fullLayout;
  return xaxis._offset + Math.min(xaxis._length, Math.max(0, xaxis.d2p(x)));
}

// The indices of the smallest and the largest finite value; undefined if there is none.
function extremes(values) {
  let low, high;
  values.forEach((x, i) => {
    if (!Number.isFinite(x)) return;
    if (!(x >= values[low])) low = i;
    if (!(x <= values[high])) high = i;
  });
  return [low, high];
}

// A series in a sentence, for those who do not see its chart; `nonfinite` are indices of NaN or Inf.
function inWords(label, steps, values, nonfinite, format) {
  const [low, high] = extremes(values), say = (i) => `${format(values[i])} in step ${steps[i]}`;
  const range = low === undefined ? "no finite value" : `smallest ${say(low)}, largest ${say(high)}, last ${say(values.length - 1)}`;
  const more = nonfinite.length > 1 ? ` and ${nonfinite.length - 1} more` : "";
  return `${label}: ${range}${nonfinite.length ? `; NaN or Inf in step ${steps[nonfinite[0]]}${more}` : ""}`;
}

// Draws a series over the steps into `box`.
//   steps, values   the data; NaN and Inf become marks at the upper edge
//   missing         whether nothing was measured at an index, which is drawn as a gap
//   nonfinite       indices that are marked although their value is finite, for the tensor has NaN or Inf
//   marks           [{at, text, severity}]: findings about the series
//   onStep          called with the index that was clicked
function drawSeries(box, { name, label, steps, values, missing, marks = [], nonfinite = [], format = short, onStep }) {
  const value = element("span", { className: "value" }), plot = element("div", { className: "plot" });
  const cursor = element("div", { className: "cursor" });
  box.className = "chart";
  box.dataset.series = name;
  box.replaceChildren(value, element("h3", { textContent: label }), plot, cursor);
  const finite = [...values].filter(Number.isFinite);
  const low = finite.reduce((a, x) => (x > 0 && x < a ? x : a), Infinity), high = finite.reduce((a, x) => Math.max(a, x), -Infinity);
  const largest = finite.reduce((a, x) => Math.max(a, Math.abs(x)), 0);
  const log = name !== "zero_fraction" && finite.length > 0 && finite.every((x) => x > 0) && high / low > 100;
  const decades = log ? powers(Math.log10(low), Math.log10(high), 4) : [];
  const line = {
    x: steps, y: Array.from(values, (x) => (Number.isFinite(x) ? x : null)), mode: steps.length > 80 ? "lines" : "lines+markers",
    line: { color: color("accent"), width: 1.5 }, marker: { size: 3 },
    text: Array.from(values, (x, i) => `step ${steps[i]}: ${format(x)}`), hovertemplate: "%{text}<extra></extra>",
  };
  const places = new Set(nonfinite);
  values.forEach((x, i) => { if (!Number.isFinite(x) && !missing(i)) places.add(i); });
  const at = [...places].sort((a, b) => a - b);
  const nonfiniteMarks = {
    x: at.map((i) => steps[i]), y: at.map(() => 0.95), yaxis: "y2", mode: "markers", name: "not finite",
    marker: { color: color("error"), symbol: "triangle-down", size: 9 },
    text: at.map((i) => `step ${steps[i]}: ${format(values[i])}`), hovertemplate: "%{text}<extra></extra>",
  };
  const findingMarks = {
    x: marks.map((m) => steps[m.at]), y: marks.map((m) => (Number.isFinite(values[m.at]) ? values[m.at] : null)),
    mode: "markers", name: "found",
    marker: { color: marks.map((m) => color(m.severity)), symbol: "diamond", size: 9, line: { color: color("surface"), width: 1 } },
    text: marks.map((m) => escaped(shortened(m.text, 160))), hovertemplate: "%{text}<extra></extra>",
  };
  const pad = Math.max(0.5, (steps[steps.length - 1] - steps[0]) / 60);
  Plotly.newPlot(plot, [line, nonfiniteMarks, findingMarks], {
    ...baseLayout({ l: 48, r: 8, t: 6, b: 22 }), dragmode: false,
    xaxis: axis({ range: [steps[0] - pad, steps[steps.length - 1] + pad], showgrid: false, tickformat: "d", nticks: 6 }),
    yaxis: axis(log ? { type: "log", tickvals: decades.map((z) => 10 ** z), ticktext: decades.map(power) } : largest < 1e-2 ? { nticks: 5, exponentformat: "e", minexponent: 2 } : { nticks: 5, tickformat: "~g" }),
    yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
  }, CONFIG);
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", inWords(label, steps, values, at, format));
  if (onStep) plot.on("plotly_click", (event) => onStep(steps.indexOf(event.points[0].x)));
  const follow = {
    box,
    step: null,
    move(step) {
      follow.step = step;
      const size = plot._fullLayout._size;
      cursor.style.left = `${pixel(plot, steps[step])}px`;
      cursor.style.top = `${plot.offsetTop + size.t}px`;
      cursor.style.height = `${size.h}px`;
      value.className = places.has(step) ? "value nonfinite" : "value";
      value.textContent = missing(step) ? "\u2013" : format(values[step]);
    },
  };
  plot.on("plotly_afterplot", () => { if (follow.step !== null) follow.move(follow.step); }); // the size may have changed
  cursors.add(follow);
  return follow;
}

// Removes the charts in a part of the page, and Plotly's state for them.
function clearCharts(part) {
  for (const follow of cursors) {
    if (!part.contains(follow.box)) continue;
    Plotly.purge(follow.box.querySelector(".plot"));
    cursors.delete(follow);
  }
  part.replaceChildren();
}

const LABELS = { norm: "gradient norm", lr: "learning rate", loss_scale: "loss scale", nonfinite: "elements not finite",
  missing: "gradients missing", finite_norm: "norm of the finite elements", loss_nonfinite: "loss not finite (1: NaN, 2: Inf)",
  refused: "decision of the guard (above 1: refused)" };
const FIRST = ["loss", "norm", "lr", "loss_scale"];

// Draws the scalars of the run: a chart for each that changes, a sentence about the others.
function drawScalars(data, onStep) {
  const norm = data.scalars.find(({ name }) => name === "norm")?.values;
  const notFinite = data.scalars.find(({ name }) => name === "loss_nonfinite");
  const place = ({ name }) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);
  const series = [...data.scalars].sort((a, b) => place(a) - place(b));
  const constant = [], draw = [];
  clearCharts(byId("series"));
  for (const { name, values, there } of series) {
    const label = LABELS[name] ?? name;
    // NaN is a value of the norm, and of the loss where it is noted; elsewhere it says that there was none.
    const isValue = (i) => !Number.isNaN(values[i]) || name === "norm" || (name === "loss" && notFinite?.values[i] > 0);
    const missing = (i) => !there[i] || !isValue(i);
    const here = Array.from(values).filter((_, i) => there[i]);
    const marks = data.findings.filter((f) => f.about === "series" && f.name === name && f.at >= 0);
    if (here.every(Number.isNaN)) {
      if (here.length) constant.push(`${label}: NaN or not given`);
    } else if (!marks.length && here.every((x) => x === here[0])) {
      constant.push(`${label} ${short(here[0])}`);
    } else if (name !== "finite_norm" || !norm || values.some((x, i) => Number.isFinite(norm[i]) && norm[i] !== x)) {
      // The norm of the finite elements is drawn only where it is another one.
      const box = element("div");
      byId("series").append(box);
      draw.push(() => drawSeries(box, { name, label, steps: data.steps, values, missing, marks, onStep }));
    }
  }
  draw.forEach((make) => make()); // their width depends on how many there are
  byId("constant").textContent = constant.length ? `The same in every step: ${constant.join(" \u00b7 ")}.` : "";
}
