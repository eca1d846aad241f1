// Lists and tables: findings, the worst tensors of a step, one tensor in detail.

const FINDINGS_SHOWN = 4;
const ROWS_SHOWN = 12;

// Pairs as terms and descriptions.
const described = (pairs) => pairs.flatMap(([key, value]) => [
  element("dt", { textContent: key }), element("dd", {}, ...breakable(value)),
]);

function drawFindings(data, { onStep, onName }) {
  if (data.culprit) byId("summary").append(element("pre", { textContent: data.culprit }));
  byId("summary").append(...data.notes.map((textContent) => element("p", { className: "note", textContent })));
  const made = data.findings.map((finding, i) => {
    const box = element("details", { className: "finding", open: i === 0 && finding.severity !== "info",
      hidden: i >= FINDINGS_SHOWN });
    box.dataset.severity = finding.severity;
    box.append(element("summary", {},
      element("span", { className: "severity", textContent: `${finding.severity}, step ${finding.step}` }),
      finding.text || finding.name, element("span", { className: "rule", textContent: finding.rule })));
    const body = element("div", { className: "body" });
    const part = (title, tag, items) => {
      if (items.length) body.append(element("div", {}, element("h3", { textContent: title }), element(tag, {}, ...items)));
    };
    const lines = (texts) => texts.map((textContent) => element("li", { textContent }));
    part("Evidence", "dl", described(finding.evidence));
    part("Likely causes", "ol", lines(finding.causes));
    part("What to try", "ol", lines(finding.advice));
    const where = element("div", { className: "where" });
    if (finding.at >= 0) where.append(button("name", `Go to step ${finding.step}`, () => onStep(finding.at)));
    if (data.tables.some((t) => t.kind === finding.about && t.names.includes(finding.name))) {
      where.append(button("name", `Show ${finding.about} ${finding.name}`, () => onName(finding.about, finding.name)));
    }
    (body.lastChild ?? body).append(where);
    box.append(body);
    return box;
  });
  byId("findings").replaceChildren(...made);
  const all = byId("all-findings");
  all.hidden = made.length <= FINDINGS_SHOWN;
  const more = data.findingsLeftOut ? ` of ${made.length + data.findingsLeftOut}` : "";
  all.textContent = `Show all ${made.length}${more} findings`;
  all.onclick = () => { made.forEach((box) => { box.hidden = false; }); all.hidden = true; };
  addEventListener("beforeprint", () => made.forEach((box) => Object.assign(box, { open: true, hidden: false })));
  if (data.steps.length && data.findings.every((finding) => finding.severity === "info")) drawChecked(data, { onStep, onName });
  byId("diagnosis").hidden = !byId("diagnosis").textContent.trim();
}

// What was checked, and what stood out most, in a run without errors and warnings.
function drawChecked(data, { onStep, onName }) {
  const bad = data.tables.reduce((sum, table) => sum + table.badCells(), 0);
  const facts = [["NaN or Inf", bad ? `in ${plural(bad, "measurement")}` : "in no tensor"]];
  if (data.rules) facts.unshift(["Rules", `${data.rules} ran, no error and no warning`]);
  for (const [name, label] of [["loss", "Largest loss"], ["norm", "Largest gradient norm"]]) {
    const values = data.scalars.find((series) => series.name === name)?.values, [, at] = extremes(values ?? []);
    if (at !== undefined) facts.push([label, short(values[at]), button("name", `step ${data.steps[at]}`, () => onStep(at))]);
  }
  const table = data.tables.find((t) => t.kind === "gradient");
  let most = { ratio: 0 };
  for (let j = 0; table && j < table.n; j++) {
    const [, i] = extremes(table.column("l2_norm").subarray(j * table.m, (j + 1) * table.m));
    const ratio = table.value("l2_norm", j, i) / table.usualNorm(j);
    if (ratio > most.ratio && Number.isFinite(ratio)) most = { ratio, j, i };
  }
  if (most.ratio) {
    const name = table.names[most.j], at = table.at[most.i];
    facts.push(["Gradient furthest above its median norm", `${short(Number(most.ratio.toPrecision(3)))} \u00d7`,
      button("name", name || "(no name)", () => { onStep(at); onName("gradient", name); }), `in step ${data.steps[at]}`]);
  }
  const measured = data.tables.map((t) => `${t.kind}: ${t.n.toLocaleString("en")} in ${plural(t.m, "step")}`);
  facts.push(["Tensors measured", measured.join(" \u00b7 ")]);
  byId("checked").replaceChildren(...facts.map(([term, ...parts]) => element("div", {},
    element("dt", { textContent: term }), element("dd", {}, ...parts.flatMap((part) => [part, " "])))));
}

// The columns of the table of the worst tensors, and their headings.
const WORST = {
  name: "Name", nan_count: "NaN", inf_count: "Inf", usual: "\u00d7 median norm", l2_norm: "Finite norm", max_abs: "Largest |x|",
  mean: "Mean", std: "Std", zero_fraction: "Zeros",
};

class WorstTable {
  constructor(onTensor) {
    this.onTensor = onTensor;
    this.sort = null; // by default not finite first, then by the norm against its median
    this.all = false;
    this.heads = Object.entries(WORST).map(([key, label]) => {
      const head = element("th", { scope: "col" }, button("", label, () => this.sortBy(key)));
      head.dataset.key = key;
      return head;
    });
    byId("worst").tHead.replaceChildren(element("tr", {}, ...this.heads));
    byId("all-rows").onclick = () => { this.all = true; this.fill(); };
  }

  // The number of a tensor in a column.
  number(key, j) {
    const { table, i } = this;
    return key === "usual" ? table.value("l2_norm", j, i) / table.usualNorm(j) : table.value(key, j, i);
  }

  sortBy(key) {
    const down = this.sort?.key === key ? !this.sort.down : key !== "name";
    this.sort = { key, down };
    this.fill();
  }

  show(data, table, step) {
    Object.assign(this, { table, i: table.measurement(step) });
    const { i } = this;
    this.title = i < 0 ? "Tensors" : `Tensors in step ${data.steps[table.at[i]]}`;
    byId("measured").textContent = i < 0 ? `No ${table.kind} had been measured by this step.`
      : table.at[i] === step ? table.kind : `${table.kind}, last measured in step ${data.steps[table.at[i]]}`;
    this.fill();
  }

  order() {
    const { table, i, sort } = this;
    const there = table.names.map((_, j) => j).filter((j) => i >= 0 && !table.absent(j, i));
    if (!sort) {
      const nonfinite = (j) => table.value("nan_count", j, i) + table.value("inf_count", j, i);
      return there.map((j) => [j, nonfinite(j), this.number("usual", j) || 0]).sort((a, b) => b[1] - a[1] || b[2] - a[2]).map(([j]) => j);
    }
    const sign = sort.down ? -1 : 1;
    if (sort.key === "name") return sort.down ? there.reverse() : there; // in the order of the model
    const last = (x) => (Number.isNaN(x) ? 1 : 0); // NaN is last in either direction
    return there.map((j) => [j, this.number(sort.key, j)])
      .sort((a, b) => last(a[1]) - last(b[1]) || sign * (a[1] - b[1]) || a[0] - b[0]).map(([j]) => j);
  }

  fill() {
    const { table } = this;
    const order = this.order(), shownRows = this.all ? order : order.slice(0, ROWS_SHOWN);
    byId("worst-title").textContent = this.title + (this.sort || this.i < 0 ? "" : ", most unusual first");
    for (const head of this.heads) {
      if (this.sort?.key === head.dataset.key) head.setAttribute("aria-sort", this.sort.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    }
    const focused = document.activeElement?.closest?.("#worst tbody") ? document.activeElement.dataset.tensor : null;
    byId("worst").tBodies[0].replaceChildren(...shownRows.map((j) => {
      const name = button("name", table.names[j] || "(no name)", () => this.onTensor(j));
      name.dataset.tensor = j;
      return element("tr", {}, element("td", {}, name), ...Object.keys(WORST).slice(1).map((key) => {
        const x = this.number(key, j), count = COUNTS.has(key);
        const textContent = Number.isNaN(x) || (count && x === 0) ? "\u2013" : shown(key, x);
        return element("td", { textContent, className: count && x > 0 ? "nonfinite" : "" });
      }));
    }));
    if (focused !== null) byId("worst").querySelector(`[data-tensor="${focused}"]`)?.focus();
    const more = byId("all-rows");
    more.hidden = shownRows.length === order.length;
    more.textContent = `Show all ${order.length}`;
  }
}

// Every field of one tensor over the steps.
function drawDetail(data, table, j, onStep) {
  const box = byId("detail");
  box.hidden = false;
  byId("detail-title").textContent = table.names[j] || "(no name)";
  byId("detail-size").textContent = `${table.kind}, ${plural(table.numel[j], "element")}`;
  clearCharts(byId("fields"));
  const nonfinite = [], gone = new Uint8Array(data.steps.length).fill(1);
  for (let i = 0; i < table.m; i++) {
    if (table.nonfinite(j, i)) nonfinite.push(table.at[i]);
    gone[table.at[i]] = table.absent(j, i) ? 1 : 0;
  }
  // Lines connect the measurements of kinds that are not measured in every step; an absent tensor is a gap.
  for (const column of Object.keys(COLUMN_LABELS)) {
    const values = table.column(column).slice(j * table.m, (j + 1) * table.m), places = table.at;
    if (COUNTS.has(column) && values.every((x) => !(x > 0))) continue;
    const part = element("div");
    byId("fields").append(part);
    const steps = places.map((p) => data.steps[p]);
    const follow = drawSeries(part, {
      name: column, label: COLUMN_LABELS[column], steps, values, missing: (i) => i < 0 || gone[places[i]] === 1,
      nonfinite: COUNTS.has(column) ? [] : nonfinite.map((p) => places.indexOf(p)), format: (x) => shown(column, x),
      onStep: (i) => onStep(places[i]),
    });
    // The page's cursor is an index of steps, the chart's one of measurements.
    cursors.delete(follow);
    cursors.add({ box: part, move: (step) => follow.move(Math.max(0, table.measurement(step))) });
  }
}
