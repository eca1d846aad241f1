// The heat map of one field, tensors by steps, and beside it a profile of the selected step.

const SEQUENTIAL = {
  light: ["#f0eee8", "#d5dfe6", "#adc7d8", "#83abc8", "#5b8fb5", "#3f76a0"],
  dark: ["#22262b", "#1f3b54", "#2a5576", "#376f97", "#4a8ab4", "#6ba5cb"],
};
const DIVERGING = {
  light: ["#1f5f99", "#8db8d8", "#f2f0ea", "#e5b07a", "#9a5212"],
  dark: ["#6fb4ea", "#2f5f87", "#22262b", "#7d5528", "#eba75c"],
};
const COUNTING = { light: ["#f0eee8", "#e58a8f", "#c81e2c"], dark: ["#22262b", "#8c343c", "#ff6470"] };
const MOST_COLUMNS = 900;

const scale = (colors) => {
  const list = colors[matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"];
  return list.map((c, i) => [i / (list.length - 1), c]);
};

// Five evenly spaced ticks from low to high; `back` maps z back to a value.
function evenly(low, high, back) {
  const zs = Array.from({ length: 5 }, (_, i) => low + ((high - low) * i) / 4);
  return zs.map((z) => ({ z, text: short(Number(back(z).toPrecision(1))) }));
}

// The colour scale of a field: a `map` from value to z, the range of z, and ticks.
function colouring(table, column) {
  const values = table.column(column).filter(Number.isFinite);
  if (COUNTS.has(column)) {
    const map = (x) => Math.log10(1 + x), high = Math.max(1, map(values.reduce((a, b) => Math.max(a, b), 0)));
    const ticks = [{ z: 0, text: "0" }, ...powers(0, high, 5).map((z) => ({ z: map(10 ** z), text: power(z) }))];
    return { map, low: 0, high, ticks, scale: scale(COUNTING) };
  }
  if (column === "zero_fraction") {
    const ticks = [0, 0.25, 0.5, 0.75, 1].map((z) => ({ z, text: `${100 * z} %` }));
    return { map: (x) => x, low: 0, high: 1, ticks, scale: scale(SEQUENTIAL) };
  }
  const sizes = values.map(Math.abs).filter((x) => x > 0).sort(); // a typed array sorts numerically
  const largest = sizes.length ? Math.log10(sizes[sizes.length - 1]) : 0;
  if (MAGNITUDES.has(column)) {
    // Starts at a low percentile, so that a few tiny values do not stretch the scale.
    const smallest = sizes.length ? Math.log10(sizes[Math.floor(sizes.length * 0.01)]) : -1;
    const low = Math.min(smallest, largest - 0.5), exact = powers(low, largest, 6);
    const ticks = exact.length > 1 ? exact.map((z) => ({ z, text: power(z) })) : evenly(low, largest, (z) => 10 ** z);
    return { map: (x) => (x > 0 ? Math.log10(x) : x === 0 ? low : NaN), low, high: largest, ticks, scale: scale(SEQUENTIAL) };
  }
  // Signed values: logarithmic on both sides of zero, from a thousandth of the median up.
  const floor = sizes.length ? sizes[sizes.length >> 1] / 1e3 : 1;
  const map = (x) => Math.sign(x) * Math.max(0, Math.log10(Math.abs(x) / floor));
  const high = Math.max(1, largest - Math.log10(floor));
  const ticks = evenly(-high, high, (z) => Math.sign(z) * floor * 10 ** Math.abs(z) * (z !== 0));
  return { map, low: -high, high, ticks, scale: scale(DIVERGING) };
}

class HeatMap {
  constructor(data, { onTensor, onMeasurement }) {
    Object.assign(this, { data, onTensor, onMeasurement, plot: byId("heat"), profile: byId("profile"), cursor: byId("heat-cursor") });
  }

  draw(table, column) {
    Object.assign(this, { table, column, colours: colouring(table, column) });
    // Steps are pooled into at most MOST_COLUMNS columns, which show the largest value, and NaN or Inf if any has one.
    this.pooled = Math.max(1, Math.ceil(table.m / MOST_COLUMNS));
    this.bins = Math.ceil(table.m / this.pooled);
    const { z, nonfinite, absent } = this.cells();
    const flat = (name, z, tint) => ({
      type: "heatmap", name, z, zmin: 0, zmax: 1, colorscale: [[0, tint], [1, tint]], showscale: false, hoverinfo: "skip",
      xgap: 0, ygap: 0,
    });
    const { low, high, ticks } = this.colours;
    const narrow = window.innerWidth < 720;
    const length = narrow ? 20 : 34;
    this.margin = { t: 20, b: 42 };
    // Where the map begins on the first screen it is no higher than that has room for, unless rows were too thin.
    const above = this.plot.getBoundingClientRect().top + window.scrollY, room = window.innerHeight - above - 86;
    const height = Math.min(760, Math.max(220, 4 * table.n, Math.min(15 * table.n, room > 0 ? room : Infinity)));
    this.height = height + this.margin.t + this.margin.b;
    this.plot.style.height = this.profile.style.height = `${this.height}px`;
    // A label takes 13 pixels. The first rows with NaN or Inf keep theirs, and others make room for them.
    const every = Math.max(1, Math.ceil((13 * table.n) / height));
    const bad = nonfinite.flatMap((row, j) => (row.includes(1) ? [j] : [])).filter((j, k, all) => !k || j - all[k - 1] >= every);
    const evenly = Array.from({ length: Math.ceil(table.n / every) }, (_, r) => r * every);
    const rows = [...bad, ...evenly.filter((j) => bad.every((b) => Math.abs(b - j) >= every))].sort((a, b) => a - b);
    const left = Math.max(40, Math.min(narrow ? 136 : 250, 14 + 7 * Math.max(0, ...rows.map((j) => Math.min(length, table.names[j].length)))));
    const y = { tickvals: rows, range: [table.n - 0.5, -0.5], fixedrange: table.n < 40 };
    Plotly.react(this.plot, [
      { type: "heatmap", name: "values", z, zmin: low, zmax: high, colorscale: this.colours.scale, hoverinfo: "none",
        hoverongaps: true, zsmooth: false,
        colorbar: { thickness: 10, outlinewidth: 0, tickvals: ticks.map((t) => t.z), ticktext: ticks.map((t) => t.text), len: 1, xpad: 8 } },
      ...[["absent", absent, "absent"], ["nonfinite", nonfinite, "error"]].map(([name, rows, tint]) => (
        flat(name, rows.some((row) => row.includes(1)) ? rows : [], color(tint)))), this.pointers(nonfinite, left),
    ], {
      ...baseLayout({ l: left, r: 70, ...this.margin }), height: this.height,
      xaxis: axis({ range: [-0.5, this.bins - 0.5], fixedrange: false, showgrid: false, title: { text: "step", standoff: 4 }, ...this.stepTicks() }),
      yaxis: axis({ ...y, showgrid: false, ticktext: rows.map((j) => escaped(shortened(table.names[j], length))) }),
    }, CONFIG);
    this.rowAxis = y;
    this.plot.setAttribute("aria-label", `Heat map: ${COLUMN_LABELS[column]} of ${plural(table.n, "tensor")} in ${plural(table.m, "step")}. `
      + "The table below holds the same numbers.");
    this.listen(this.plot, (x) => [x * this.pooled, Math.min(this.table.m, (x + 1) * this.pooled)]);
    byId("heat-note").textContent = this.pooled > 1
      ? `A column is up to ${this.pooled} steps and shows the largest of them; a column with any NaN or Inf is red.` : "";
  }

  // An arrow left of the first cell of each run of cells with NaN or Inf, to be seen beside the darkest column.
  pointers(nonfinite, left) {
    const width = (this.plot.clientWidth - left - 70) / this.bins;
    const x = [], y = [];
    nonfinite.forEach((row, j) => row.forEach((b, i) => {
      if (b === 1 && !(i && row[i - 1] === 1) && x.length < 300) { x.push(i - 0.5 - 4 / width); y.push(j); }
    }));
    return {
      type: "scatter", mode: "markers", name: "pointers", x, y, hoverinfo: "skip",
      marker: { symbol: "triangle-right", size: 11, color: color("error"), line: { width: 1.5, color: color("surface") } },
    };
  }

  // Rows of z values, and masks of the cells that are not finite or absent.
  cells() {
    const { table, pooled, bins } = this;
    const { map } = this.colours;
    const values = table.column(this.column), nan = table.column("nan_count"), inf = table.column("inf_count");
    const counting = COUNTS.has(this.column);
    const blank = () => Array.from(table.names, () => new Float32Array(bins).fill(NaN));
    const z = blank(), nonfinite = blank(), absent = blank();
    for (let j = 0; j < table.n; j++) {
      for (let b = 0; b < bins; b++) {
        const from = j * table.m + b * pooled, to = Math.min((j + 1) * table.m, from + pooled);
        let best = NaN, there = false;
        for (let k = from; k < to; k++) {
          const x = values[k];
          there ||= nan[k] === nan[k];
          if (!counting && (nan[k] > 0 || inf[k] > 0)) nonfinite[j][b] = 1;
          if (Number.isFinite(x) && !(Math.abs(x) <= Math.abs(best))) best = x;
        }
        z[j][b] = map(best); // NaN stays NaN
        if (!there) absent[j][b] = 1;
      }
    }
    return { z, nonfinite, absent };
  }

  stepTicks() {
    const count = Math.min(this.bins, Math.max(2, Math.floor(this.plot.clientWidth / 110)));
    const bins = [...new Set(Array.from({ length: count }, (_, i) => Math.round((i * (this.bins - 1)) / Math.max(1, count - 1))))];
    return { tickvals: bins, ticktext: bins.map((b) => String(this.data.steps[this.table.at[b * this.pooled]])) };
  }

  // Marks the last measurement up to a step, and draws its profile.
  show(step) {
    this.step = step;
    this.point();
    if (getComputedStyle(this.profile).display !== "none") this.drawProfile(this.table.measurement(step));
  }

  point() {
    const { table, plot, cursor } = this;
    if (this.step === undefined) return;
    const i = table.measurement(this.step), size = plot._fullLayout._size;
    const left = pixel(plot, i < 0 ? -0.5 : Math.floor(i / this.pooled));
    Object.assign(cursor.style, { left: `${left}px`, top: `${size.t}px`, height: `${size.h}px` });
    cursor.dataset.label = i < 0 ? "" : `step ${this.data.steps[table.at[i]]}`;
  }

  drawProfile(i) {
    const { table, column } = this;
    const { map, low, high, scale, ticks } = this.colours;
    // Bars have the scale of the map, so that longer is darker, and begin where the colours do.
    const base = SIGNED.has(column) ? 0 : low;
    const zs = table.names.map((_, j) => {
      const x = i < 0 ? NaN : table.value(column, j, i);
      return Number.isFinite(x) ? map(x) - base : 0;
    });
    const tint = scale[Math.max(0, scale.length - 3)][1];
    const nonfinite = table.names.map((_, j) => i >= 0 && table.nonfinite(j, i));
    const every2nd = ticks.filter((_, k) => k % 2 === 0);
    Plotly.react(this.profile, [{
      type: "bar", orientation: "h", y: table.names.map((_, j) => j), x: zs, base, hoverinfo: "none",
      marker: { color: nonfinite.map((b) => (b ? color("error") : SIGNED.has(column) ? color("accent") : tint)) },
    }], {
      ...baseLayout({ l: 4, r: 16, ...this.margin }), height: this.height, bargap: table.n > 60 ? 0.1 : 0.3, dragmode: false,
      xaxis: axis({ range: [low, high + (high - low) * 0.02], tickvals: every2nd.map((t) => t.z),
        ticktext: every2nd.map((t) => t.text), title: { text: i < 0 ? "" : `in step ${this.data.steps[table.at[i]]}`, standoff: 4 } }),
      yaxis: axis({ ...this.rowAxis, range: this.plot._fullLayout.yaxis.range, showticklabels: false, showgrid: false }),
    }, CONFIG);
    this.profile.setAttribute("aria-label", `${COLUMN_LABELS[column]} of each tensor in this step`);
    this.listen(this.profile, () => [this.shownAt, this.shownAt + 1]);
    this.shownAt = i;
  }

  // Registers the events of a drawn chart; `range` gives the measurements under the pointer, end exclusive.
  listen(plot, range) {
    if (plot.dataset.listening) return;
    plot.dataset.listening = "yes";
    plot.on("plotly_hover", (e) => this.tip(e.event, e.points[0].y, ...range(e.points[0].x)));
    plot.on("plotly_unhover", () => { byId("tip").hidden = true; });
    plot.on("plotly_click", (e) => {
      this.onMeasurement(Math.max(0, range(e.points[0].x)[0]));
      this.onTensor(e.points[0].y);
    });
    if (plot !== this.plot) return;
    plot.on("plotly_relayout", () => this.show(this.step));
    plot.on("plotly_afterplot", () => this.point()); // the size may have changed
  }

  // Shows what is under the pointer, for measurements `from` up to but not including `to`.
  tip(event, j, from, to) {
    const { table, column, data } = this;
    if (from < 0) return;
    let best = from, nan = 0, inf = 0;
    for (let i = from; i < to; i++) {
      const x = Math.abs(table.value(column, j, i));
      if (x > Math.abs(table.value(column, j, best)) || Number.isNaN(table.value(column, j, best))) best = i;
      nan = Math.max(nan, table.value("nan_count", j, i) || 0);
      inf = Math.max(inf, table.value("inf_count", j, i) || 0);
    }
    const steps = to - from > 1 ? `steps ${data.steps[table.at[from]]}\u2013${data.steps[table.at[to - 1]]}` : `step ${data.steps[table.at[from]]}`;
    const what = table.absent(j, best) ? "missing" : `${COLUMN_LABELS[column]} ${shown(column, table.value(column, j, best))}`;
    const counts = [[nan, "NaN"], [inf, "Inf"]].filter(([n]) => n).map(([n, kind]) => `, ${short(n)} ${kind}`).join("");
    const tip = byId("tip");
    tip.replaceChildren(element("b", { textContent: table.names[j] }), `${steps}: ${what}${counts}`);
    tip.hidden = false;
    const left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${Math.max(8, Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8))}px`;
  }
}
