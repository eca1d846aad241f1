// Unpacks the recording that gradstat/monitor/page_data.py packed, and formats its names and numbers.

const COLUMN_LABELS = {
  l2_norm: "L2 norm, finite part", max_abs: "largest |x|", mean: "mean", std: "standard deviation", min: "smallest", max: "largest",
  zero_fraction: "fraction of zeros", nan_count: "NaN elements", inf_count: "Inf elements",
};
const MAGNITUDES = new Set(["l2_norm", "std", "max_abs"]);
const SIGNED = new Set(["mean", "min", "max"]);
const RANK = ["info", "warning", "error"];
const COUNTS = new Set(["nan_count", "inf_count"]);

function inflated(text) {
  const raw = atob(text), deflated = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) deflated[i] = raw.charCodeAt(i);
  return new Response(new Blob([deflated]).stream().pipeThrough(new DecompressionStream("deflate")));
}

async function unpacked(text, width) {
  const planes = new Uint8Array(await inflated(text).arrayBuffer());
  const count = planes.length / width, bytes = new Uint8Array(planes.length);
  for (let b = 0; b < width; b++) {
    for (let i = 0, from = b * count; i < count; i++) bytes[i * width + b] = planes[from + i];
  }
  return width === 4 ? new Float32Array(bytes.buffer) : new Float64Array(bytes.buffer);
}

// Tensors of one kind. `at` are indices into the page's steps; a measurement is an index into `at`.
class Table {
  constructor(packed, columns, values) {
    const { kind, names, numel, at } = packed;
    Object.assign(this, { kind, names, numel, at, n: names.length, m: at.length, columns, values, usual: new Map() });
  }

  // [n * m], contiguous over the steps of a tensor.
  column(name) {
    if (name !== "max_abs") {
      const c = this.columns.indexOf(name), size = this.n * this.m;
      return this.values.subarray(c * size, (c + 1) * size);
    }
    const high = this.column("max");
    this.largest ??= this.column("min").map((x, i) => Math.max(Math.abs(x), Math.abs(high[i])));
    return this.largest;
  }

  value(name, j, i) { return this.column(name)[j * this.m + i]; }
  nonfinite(j, i) { return this.value("nan_count", j, i) > 0 || this.value("inf_count", j, i) > 0; }
  absent(j, i) { return Number.isNaN(this.value("nan_count", j, i)); }

  badCells() {
    const inf = this.column("inf_count");
    return this.column("nan_count").filter((n, k) => n > 0 || inf[k] > 0).length;
  }

  // The last measurement at or before a step; -1 if there is none.
  measurement(step) { return this.at.findLastIndex((place) => place <= step); }

  // The median of a tensor's norm over the steps in which it was finite.
  usualNorm(j) {
    if (!this.usual.has(j)) {
      const norms = this.column("l2_norm").slice(j * this.m, (j + 1) * this.m)
        .filter((_, i) => !this.nonfinite(j, i) && !this.absent(j, i)).sort(); // a typed array sorts numerically
      this.usual.set(j, norms.length ? norms[norms.length >> 1] : NaN);
    }
    return this.usual.get(j);
  }
}

async function readRecording() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const rows = await unpacked(data.scalars.data, 8), width = data.scalars.at.length;
  data.scalars = data.scalars.names.map((name, s) => {
    const values = new Float64Array(data.steps.length).fill(NaN), there = new Uint8Array(data.steps.length);
    data.scalars.at.forEach((place, i) => { values[place] = rows[s * width + i]; there[place] = 1; });
    return { name, values, there };
  });
  const unpack = async (table) => new Table(table, data.columns, await unpacked(table.data, 4));
  data.tables = await Promise.all(data.tables.map(unpack));
  return data;
}

function short(x) {
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return x > 0 ? "Inf" : "\u2212Inf";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (Number.isInteger(x) && size < 1e7) return x.toLocaleString("en");
  return size >= 1e-3 && size < 1e5 ? String(Number(x.toPrecision(4))) : x.toExponential(2);
}

function shown(column, x) {
  if (column === "zero_fraction" && Number.isFinite(x)) return `${Number((100 * x).toPrecision(3))} %`;
  return short(x);
}

function shortened(name, length) {
  if (name.length <= length) return name;
  if (length <= 20) { // "blocks.0.attention.qkv.weight" is "b.0.a.qkv.weight"
    name = name.replace(/(?<=^|\.)[^.\d][^.]*(?=\..*\.)/g, (part) => [...part][0]);
    return name.length <= length ? name : `\u2026${name.slice(1 - length)}`; // names differ at their ends
  }
  const head = Math.floor(length / 3);
  return `${name.slice(0, head)}\u2026${name.slice(head + 1 - length)}`;
}

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// Plotly interprets a subset of HTML in texts.
const escaped = (textContent) => element("p", { textContent }).innerHTML;
const byId = (id) => document.getElementById(id);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
// A text whose long names wrap after their dots.
const breakable = (text) => text.split(/(?<=\.)(?=\w)/).flatMap((part, i) => (i ? [element("wbr"), part] : [part]));
const button = (className, text, onclick) => element("button", { type: "button", className, onclick }, ...breakable(text));
const plural = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;
