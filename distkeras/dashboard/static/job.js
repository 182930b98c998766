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
    this.attempts = new AttemptsTable();
    this.none = h("p", { class: "none" });
    this.element = h(
      "article",
      { class: "job", "aria-labelledby": heading },
      h("div", { class: "head" }, this.heading, this.state),
      this.facts,
      this.why,
      this.none,
      this.body,
      this.attempts.element
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

  /** Sets how the job server describes the job. */
  setOutside(outside) {
    this.job.outside = outside;
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
    const predicts = job.outside && job.outside.kind === "predict";
    say(this.none, predicts ? "A predict job has no charts." : "No job yet: the page begins with the training.");
    this.attempts.update((job.outside && job.outside.attempts) || []);
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
    say(this.facts, [this.job.name.startsWith(facts.rule) ? "" : facts.rule, many(facts.workers, "worker"), many(facts.epochs, "epoch") + (facts.stream ? " of each micro-batch" : ""), facts.batch_size ? `mini-batches of ${facts.batch_size}` : ""].filter(Boolean).join(" · "));
    const epochs = Math.min(now.epochs, facts.epochs);
    this.bar.max = facts.epochs;
    this.bar.value = epochs;
    const left = now.left === null || this.job.over ? "" : ` · ${clock(now.left)} left`;
    this.bar.hidden = Boolean(facts.stream);
    say(this.passed, facts.stream ? `A stream · ${clock(now.at)}` : `Epoch ${epochs.toFixed(2)} of ${facts.epochs} · ${clock(now.at)}${left}`);
    if (facts.stream) this.updateStream(now.micro_batch);
    this.tile("Loss", amount(this.job.lastLoss()), this.job.over ? "latest mean" : "mean of recent commits");
    const metric = this.job.metrics.includes(this.view.metric) ? this.view.metric : "loss";
    const evaluated = this.job.lastEvaluation(metric);
    this.tile("Evaluated", evaluated === null ? "–" : amount(evaluated), `${metric} of the center`);
    const over = this.job.over && this.job.trained > 0;
    this.tile("Samples/s", amount(over ? now.samples / this.job.trained : now.rate, 3), `over ${over ? "all of" : "the last"} ${clock(over ? this.job.trained : now.rate_seconds)}`);
    this.tile("Samples", amount(now.samples));
    this.tile("Commits", amount(now.commits));
    this.tile("Workers", this.alive(), "that train");
    this.tile("Retries", amount(this.job.total("retries")), "taken over");
    this.tile("Fenced", amount(this.job.total("fenced")), "requests refused");
    this.tile("Snapshots", this.snapshots(), this.latestSnapshot());
  }

  /** How a stream stands, by its latest micro-batch; null: there is none yet. */
  updateStream(latest) {
    const { batch, rows, seconds, lag, backlog } = latest || {};
    const known = latest !== null;
    this.tile("Micro-batch", known ? amount(batch) : "–", known ? `${amount(rows)} rows in ${amount(seconds, 3)} s` : "the latest");
    this.tile("Lag", isKnown(lag) ? `${amount(lag, 3)} s` : "–", "of the latest, at most");
    const [first, ...others] = Object.entries(backlog || {});
    if (first) this.tile("Backlog", amount(first[1]), [first[0], ...others.map(([name, value]) => `${name} ${amount(value)}`)].join(", "));
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
