// One job: how it stands, in numbers, charts and tables.

class JobView {
  /** `job`: its state. */
  constructor(job) {
    this.job = job;
    this.view = { metric: "loss", worker: "", scale: "linear", axis: "time" };
    const redraw = () => this.update();
    const heading = freshId("job");
    this.heading = h("h2", { id: heading, text: job.name });
    this.state = h("span", { class: "state", text: "waiting" });
    this.why = h("p", { class: "why" });
    this.facts = h("p", { class: "facts" });
    this.bar = h("progress", { max: 1, value: 0, "aria-label": "Epochs" });
    this.passed = h("p", { class: "passed" });
    this.tiles = h("dl", { class: "tiles" });
    this.numbers = new Map();
    this.charts = new JobCharts(this.view, redraw);
    this.workers = new WorkersTable(this.view, redraw);
    this.events = new EventsTable(redraw);
    this.body = h("div", { class: "body", hidden: true }, this.bar, this.passed, this.tiles, this.charts.element, this.workers.element, this.events.element);
    this.none = h("p", { class: "none", text: "No job yet: the page begins with the training." });
    this.element = h(
      "article",
      { class: "job", "aria-labelledby": heading },
      h("div", { class: "head" }, this.heading, this.state),
      this.facts,
      this.why,
      this.none,
      this.body
    );
  }

  remove() {
    this.charts.remove();
    this.element.remove();
  }

  /** Has it drawn with the next frame, whatever came until then. */
  touch() {
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => {
      this.due = false;
      const began = performance.now();
      this.update();
      performance.measure("distkeras frame", { start: began, end: performance.now() });
    });
  }

  /** Sets what somebody else than the job's journal knows: its state, and why. */
  setOutside(state, why) {
    this.job.outside = { state, why };
    this.touch();
  }

  update() {
    const { job } = this;
    say(this.heading, job.name);
    say(this.state, job.state);
    this.state.dataset.state = job.state;
    say(this.why, job.why);
    this.why.hidden = !job.why;
    this.none.hidden = job.known;
    this.body.hidden = this.facts.hidden = !job.known;
    if (!job.known) return;
    this.updateHead();
    this.charts.update(job);
    this.workers.update(job);
    this.events.update(job);
  }

  updateHead() {
    const { now, facts } = this.job;
    const many = (count, word) => `${amount(count)} ${word}${count === 1 ? "" : "s"}`;
    say(this.facts, [this.job.name.startsWith(facts.rule) ? "" : facts.rule, many(facts.workers, "worker"), many(facts.epochs, "epoch"), facts.batch_size ? `mini-batches of ${facts.batch_size}` : ""].filter(Boolean).join(" · "));
    const epochs = Math.min(now.epochs, facts.epochs);
    this.bar.max = facts.epochs;
    this.bar.value = epochs;
    const left = now.left === null || this.job.over ? "" : ` · ${clock(now.left)} left`;
    say(this.passed, `Epoch ${epochs.toFixed(2)} of ${facts.epochs} · ${clock(now.at)}${left}`);
    this.tile("Loss", amount(this.job.over || now.loss === null ? this.lastMean() : now.loss));
    const metric = this.job.metrics.includes(this.view.metric) ? this.view.metric : "loss";
    const evaluated = this.job.lastEvaluation(metric);
    this.tile("Evaluated", evaluated === null ? "–" : amount(evaluated), `${metric} of the center`);
    const rate = this.job.over && now.at > 0 ? now.samples / now.at : now.rate;
    this.tile("Samples/s", amount(rate, 3), `${amount(now.samples)} in all`);
    this.tile("Commits", amount(now.commits));
    this.tile("Workers", this.alive(), "that train");
    this.tile("Retries", amount(this.job.total("retries")), "taken over");
    this.tile("Fenced", amount(this.job.total("fenced")), "requests refused");
    this.tile("Snapshots", this.snapshots(), this.latestSnapshot());
  }

  tile(name, text, note = "") {
    if (!this.numbers.has(name)) {
      const number = h("dd", { class: "value" });
      const aside = h("dd", { class: "note" });
      this.tiles.append(h("div", {}, h("dt", { text: name }), number, aside));
      this.numbers.set(name, { number, aside });
    }
    const { number, aside } = this.numbers.get(name);
    say(number, text);
    say(aside, note);
  }

  lastMean() {
    const line = this.job.means.loss || this.job.means[this.job.metrics[0]];
    for (let place = line.length - 1; place >= 0; place -= 1) if (line[place] !== null) return line[place];
    return null;
  }

  alive() {
    const count = this.job.facts.workers;
    let training = 0;
    for (let worker = 0; worker < count; worker += 1) training += this.job.workerState(worker) === "training";
    return `${training} of ${count}`;
  }

  /** Whether the server can save its state, by what it has told of that last. */
  snapshots() {
    if (!this.job.facts.saved) return "off";
    const told = this.job.events.filter(([, , kind]) => kind === "snapshot").pop();
    return told && !/succeed again/.test(told[5]) ? "failing" : "on";
  }

  /** What the latest snapshot has, and how old it is. */
  latestSnapshot() {
    const { saved_commits: commits, saved_seconds: age } = this.job.now;
    if (this.job.over || commits === null || commits === undefined) return "";
    return `of ${amount(commits)} commits, ${clock(age)} ago`;
  }
}

/** The loss of several jobs in one chart, and their numbers in one table. */
class Comparison {
  constructor(views) {
    this.views = views;
    this.axis = "time";
    const axis = choice("Along", [["time", "time"], ["commits", "commits"], ["samples", "samples"]], "time", (value) => {
      this.axis = value;
      this.update();
    });
    this.plot = new Plot({ title: "Loss of all workers, job by job", tools: [axis.element], height: 280 });
    this.element = h("section", { class: "compare" }, h("h2", { text: "Side by side" }), this.plot.element);
  }

  remove() {
    this.plot.remove();
    this.element.remove();
  }

  update() {
    const jobs = this.views.map((view) => view.job).filter((job) => job.known);
    this.element.hidden = jobs.length < 2;
    if (jobs.length < 2) return;
    const tables = jobs.map((job) => {
      const { places, x } = job.axis(this.axis);
      const line = job.means[job.metrics[0]];
      const rows = places.map((place, number) => [x[number], line[place]]).filter(([, value]) => value !== null);
      return [rows.map(([at]) => at), rows.map(([, value]) => value)];
    });
    const [x, ...lines] = uPlot.join(tables);
    const series = lines.map((values, number) => ({ label: jobs[number].name, values: Array.from(values, (value) => value ?? null), color: `worker-${number % LINES_MAX}`, width: 2 }));
    const [xName, xText] = AXES[this.axis];
    const summary = jobs.map((job) => `${job.name}: ${amount(job.now.loss)}`).join("; ");
    this.plot.set({ x: Array.from(x), xName, xText, series, summary });
  }
}
