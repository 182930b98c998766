// Several jobs side by side: one chart of a metric, and one table of results and settings.

/** The reader's choices, which stay when jobs are added and removed. */
const compared = { line: "loss", axis: "time", differing: false };

/** Further lines besides the metrics of all workers: a name, and its values by bucket. */
const OF_JOBS = {
  "samples per second": (job) => job.rates(RATE_SECONDS),
  staleness: (job) => job.job.staleness,
  gap: (job) => job.job.gap,
  scale: (job) => job.job.scale,
};

class Comparison {
  constructor(views) {
    this.views = views;
    const choose = (name) => (value) => {
      compared[name] = value;
      this.plot.zoomTo(null);
      this.update();
    };
    this.line = choice("Show", [[compared.line, compared.line]], compared.line, choose("line"));
    this.axis = choice("Along", ALONG, compared.axis, choose("axis"));
    this.plot = new Plot({ title: "Job by job", tools: [this.line.element, this.axis.element], height: 280 });
    const heading = freshId("settings");
    const id = freshId("differing");
    this.box = h("input", { type: "checkbox", id, checked: compared.differing, onchange: () => this.setDiffering() });
    this.table = h("table", { class: "settings" });
    const tools = h("div", { class: "tools" }, h("span", { class: "choice" }, this.box, h("label", { for: id, text: "Only what differs" })));
    const scroll = h("div", { class: "scroll", tabindex: 0, role: "group", "aria-labelledby": heading }, this.table);
    this.settings = h("section", { class: "card" }, h("div", { class: "head" }, h("h3", { id: heading, text: "Results and settings" }), tools), scroll);
    this.element = h("section", { class: "compare" }, h("h2", { text: "Side by side" }), this.plot.element, this.settings);
  }

  remove() {
    this.plot.remove();
    this.element.remove();
  }

  setDiffering() {
    compared.differing = this.box.checked;
    this.update();
  }

  update() {
    const jobs = this.views.map((view) => view.job).filter((job) => job.known);
    this.element.hidden = jobs.length < 2;
    if (jobs.length < 2) return;
    this.draw(jobs);
    this.fill(jobs);
  }

  /** The lines that at least one job has, by name: each returns the values of a job by bucket, or none. */
  lines(jobs) {
    const lines = new Map();
    const add = (name, values) => {
      if (!lines.has(name) && jobs.some((job) => (values(job) || []).some(isKnown))) lines.set(name, values);
    };
    const metrics = new Set(jobs.flatMap((job) => job.metrics));
    for (const metric of metrics) add(metric, (job) => job.means[metric]);
    const evaluated = new Set(jobs.flatMap((job) => job.evaluations.flatMap(([, , , found]) => Object.keys(found))));
    for (const metric of evaluated) add(`${metric} of the center`, (job) => job.evaluated(metric));
    for (const [name, values] of Object.entries(OF_JOBS)) add(name, values);
    return lines;
  }

  draw(jobs) {
    const lines = this.lines(jobs);
    const names = lines.size ? [...lines.keys()] : ["loss"];
    fillChoice(this.line.select, names.map((name) => [name, name]), compared.line);
    const name = this.line.select.value;
    const values = lines.get(name) || (() => null);
    const drawn = jobs.map((job, number) => ({ job, color: `worker-${number % LINES_MAX}`, line: values(job), axis: job.axis(compared.axis) })).filter(({ line }) => line && line.some(isKnown));
    const tables = drawn.map(({ line, axis }) => {
      const rows = axis.values(line).map((value, place) => [axis.x[place], value]).filter(([, value]) => value !== undefined);
      return [rows.map(([at]) => at), rows.map(([, value]) => value)];
    });
    const [x, ...joined] = tables.length ? uPlot.join(tables) : [[]];
    const points = name.endsWith(" of the center");
    const series = joined.map((line, number) => ({ label: drawn[number].job.name, values: Array.from(line), color: drawn[number].color, width: 2, points }));
    const pauses = drawn.flatMap(({ axis, color: stroke }) => axis.pauses.map(({ from, to, seconds }) => ({ from, to, seconds, color: stroke })));
    const missing = jobs.filter((job) => !drawn.some((one) => one.job === job)).map((job) => job.name);
    const latest = drawn.map(({ job, line }) => `${job.name}: ${amount(line.findLast(isKnown))}`);
    const summary = [`The latest values of ${name}: ${latest.join("; ")}.`, missing.length ? `Without it: ${missing.join(", ")}.` : ""].join(" ");
    const [xName, xText] = AXES[compared.axis];
    say(this.plot.caption, `Job by job: ${name}`);
    this.plot.set({ x: Array.from(x), xName, xText, xSteps: compared.axis === "time" ? STEPS : undefined, series, pauses, several: true, stay: true, summary });
  }

  fill(jobs) {
    const settings = jobs.map((job) => job.settings);
    const names = [...new Set(settings.flatMap((one) => Object.keys(one)))];
    const rows = names.map((name) => {
      const values = settings.map((one) => (isKnown(one[name]) ? String(one[name]) : "–"));
      return { name, values, differs: new Set(values).size > 1 };
    });
    const results = [
      ["State", (job) => job.stateText],
      ["Loss", (job) => amount(job.latestMean())],
      ["Loss of the center", (job) => amount(job.lastEvaluation("loss"))],
      ["Epochs", (job) => amount(job.now.epochs)],
      ["Time of training", (job) => clock(job.trained)],
      ["Samples per second", (job) => amount(job.meanRate)],
    ].map(([name, text]) => ({ name, values: jobs.map(text), result: true }));
    const shown = [...results, ...rows.filter((row) => row.differs), ...rows.filter((row) => !row.differs && !compared.differing)];
    const filled = JSON.stringify([jobs.map((job) => job.name), shown]);
    if (filled === this.filled) return;
    this.filled = filled;
    const head = h("tr", {}, ...["", ...jobs.map((job) => job.name)].map((text) => (text ? h("th", { scope: "col", text }) : h("td"))));
    this.table.replaceChildren(h("caption", { class: "aside", text: "Results and settings" }), h("thead", {}, head), h("tbody", {}, ...shown.map((row) => this.row(row))));
  }

  row({ name, values, differs, result }) {
    const mark = differs ? h("span", { class: "mark", text: "differs" }) : null;
    const head = h("th", { scope: "row" }, h("span", { text: name }), mark);
    return h("tr", { class: differs ? "differs" : result ? "result" : "" }, head, ...values.map((text) => h("td", { text })));
  }
}
