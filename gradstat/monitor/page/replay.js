// The page: the selected step, table, column and tensor, and what is redrawn when they change.

const LONGEST_REPLAY = 15_000; // milliseconds

async function main() {
  const data = await readRecording();
  document.head.append(element("script", { textContent: await inflated(byId("plotly").textContent).text() }));
  const last = data.steps.length - 1;
  const state = { step: data.incident >= 0 ? data.incident : Math.max(0, last), table: null, column: "l2_norm", tensor: null,
    opener: null };
  const slider = byId("step"), play = byId("play");
  let timer = null;

  document.querySelector("main").hidden = false;
  byId("headline").textContent = data.headline;
  byId("headline").dataset.level = data.level;
  const left = data.leftOut ? `, ${plural(data.leftOut, "step")} left out to keep the page small; steps with NaN, Inf or findings are kept where possible` : "";
  byId("extent").textContent = data.steps.length ? `steps ${data.steps[0]}\u2013${data.steps[last]}${left}` : "no steps";
  byId("meta").replaceChildren(...described([...data.meta, ["viewed with", `gradstat ${data.gradstat}`]]));

  const goTo = (step) => { stop(); show(step); };
  drawFindings(data, { onStep: goTo, onName: (kind, name) => {
    const table = data.tables.find((t) => t.kind === kind);
    choose(table, state.column);
    detail(table.names.indexOf(name));
  } });
  if (!data.steps.length) {
    for (const section of document.querySelectorAll("main > section:not(#diagnosis)")) section.hidden = true;
    document.body.dataset.ready = "yes";
    return;
  }

  const tables = data.tables.filter((t) => t.n && t.m);
  const worst = new WorstTable((j) => detail(j));
  const heat = new HeatMap(data, { onTensor: (j) => detail(j), onMeasurement: (i) => goTo(state.table.at[i]) });
  for (const id of ["heat-title", "worst-title"]) byId(id).closest("section").hidden = !tables.length;

  byId("kind").append(...tables.map((t, i) => element("option", { value: i, textContent: t.kind })));
  byId("column").append(...Object.entries(COLUMN_LABELS).map(([value, textContent]) => element("option", { value, textContent })));
  byId("kind").addEventListener("change", () => choose(tables[byId("kind").value], state.column));
  byId("column").addEventListener("change", () => choose(state.table, byId("column").value));
  slider.max = last;
  slider.addEventListener("input", () => goTo(Number(slider.value)));
  play.addEventListener("click", () => (timer === null ? start() : stop()));
  byId("incident").hidden = data.incident < 0;
  byId("incident").addEventListener("click", () => goTo(data.incident));
  byId("close").addEventListener("click", close);
  document.addEventListener("keydown", pressed);
  let resized = null;
  window.addEventListener("resize", () => {
    clearTimeout(resized);
    resized = setTimeout(() => choose(state.table, state.column), 200); // margins and ticks depend on the width
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  marks();
  if (tables.length) state.table = tables[0];
  draw();
  document.body.dataset.ready = "yes";

  // Draws everything, at first and when the colour scheme changes.
  function draw() {
    drawScalars(data, goTo);
    choose(state.table, state.column);
    if (state.tensor !== null) detail(state.tensor, false);
  }

  function choose(table, column) {
    const opened = state.tensor !== null && table !== state.table ? state.table.names[state.tensor] : null;
    Object.assign(state, { table, column });
    if (opened !== null) {  // the same tensor of another kind, if there is one
      const j = table.names.indexOf(opened);
      if (j < 0) close(); else detail(j, false);
    }
    if (table) {
      byId("kind").value = tables.indexOf(table);
      byId("column").value = column;
      heat.draw(table, column);
    }
    show(state.step);
  }

  function show(step) {
    state.step = Math.min(last, Math.max(0, step));
    slider.value = state.step;
    slider.setAttribute("aria-valuetext", `step ${data.steps[state.step]}`);
    byId("now").textContent = `step ${data.steps[state.step]} of ${data.steps[last]}`;
    for (const follow of cursors) follow.move(state.step);
    if (state.table) {
      heat.show(state.step);
      worst.show(data, state.table, state.step);
    }
  }

  function detail(j, move = true) {
    state.tensor = j;
    drawDetail(data, state.table, j, goTo);
    for (const follow of cursors) follow.move(state.step);
    if (!move) return;
    state.opener = document.activeElement;
    byId("detail-title").focus({ preventScroll: true });
    const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    byId("detail").scrollIntoView({ behavior: calm ? "auto" : "smooth", block: "end" });
  }

  function close() {
    const opener = state.opener?.isConnected ? state.opener : slider;
    if (byId("detail").contains(document.activeElement)) opener.focus({ preventScroll: true });
    byId("detail").hidden = true;
    state.tensor = null;
    clearCharts(byId("fields"));
  }

  // Plays up to the incident, or from after it to the end; from either end point it starts at the beginning.
  function start() {
    const incident = data.incident > 0 ? data.incident : last;  // up to the first step there is nothing to play
    let goal = state.step > incident ? last : incident;
    if (state.step === last || state.step === incident) { show(0); goal = incident; }
    const stride = Math.max(1, Math.ceil(goal / 300));
    const pause = Math.min(200, Math.max(40, LONGEST_REPLAY / Math.max(1, (goal - state.step) / stride)));
    play.textContent = "Pause";
    byId("now").ariaLive = "off"; // not every step of a replay is to be read out
    const advance = () => {
      show(Math.min(goal, state.step + stride));
      if (state.step >= goal) stop(); else timer = setTimeout(advance, pause);
    };
    timer = setTimeout(advance, pause);
  }

  function stop() {
    clearTimeout(timer);
    timer = null;
    play.textContent = "Play";
    byId("now").ariaLive = "polite";
  }

  // Keys of the whole page, except where an element has its own meaning for them.
  function pressed(event) {
    const { key, target } = event;
    if (event.ctrlKey || event.metaKey || event.altKey || target.closest("select, textarea, input:not(#step)")) return;
    if (key.startsWith("Arrow") && target === slider) return;
    if (key === " " && target.closest("button, summary")) return;
    const moves = { ArrowLeft: () => goTo(state.step - 1), ArrowRight: () => goTo(state.step + 1), " ": () => play.click(),
      i: () => goTo(data.incident >= 0 ? data.incident : state.step) };
    if (!(key in moves)) return;
    event.preventDefault();
    moves[key]();
  }

  // Marks above the slider: steps with findings, NaN or Inf.
  function marks() {
    const places = new Map();
    for (const table of data.tables) {
      const nan = table.column("nan_count"), inf = table.column("inf_count");
      for (let k = 0; k < nan.length; k++) if (nan[k] > 0 || inf[k] > 0) places.set(table.at[k % table.m], "error");
    }
    for (const f of data.findings) {
      if (f.at >= 0 && RANK.indexOf(f.severity) > RANK.indexOf(places.get(f.at))) places.set(f.at, f.severity);
    }
    byId("marks").replaceChildren(...[...places].map(([place, severity]) => {
      const mark = element("i", { className: severity });
      mark.style.left = `${(100 * place) / Math.max(1, last)}%`;
      return mark;
    }));
  }
}

main().catch((error) => {
  byId("headline").textContent = typeof DecompressionStream === "undefined"
    ? "This browser is too old for this page: it needs one of 2023 or later." : `The page could not be drawn: ${error.message}`;
  throw error;
});
