// One job: its name and state, and its numbers, charts and tables.

/** A rule and the settings that it was given, from its Python source; "None" and "False" are no settings. */
function inWords(source) {
  const [, name, given] = /^(\w+)(?:\((.*)\))?$/.exec(source) || [null, source, ""];
  const settings = (given || "").split(/, (?=\w+=)/).filter((one) => one && !/=(None|False)$/.test(one));
  return [name, ...settings.map((one) => one.replace(/=True$/, "").replace("=", " ").replaceAll("_", " ").replaceAll("'", ""))];
}

/** The most names of columns in the headline. */
const COLUMNS_MAX = 4;

class JobView {
  /** `job`: its state. */
  constructor(job) {
    this.job = job;
    this.view = { metric: "", worker: "", scale: "linear", axis: "time" };
    const redraw = () => this.update();
    const heading = freshId("job");
    this.heading = h("h2", { id: heading, text: job.name });
    this.state = h("span", { class: "state", text: "waiting" });
    this.why = h("p", { class: "why" });
    this.facts = h("p", { class: "facts" });
    this.input = h("p", { class: "facts" });
    this.bar = h("progress", { max: 1, value: 0, "aria-label": "Epochs" });
    this.passed = h("p", { class: "passed" });
    this.tiles = h("dl", { class: "tiles" });
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
      this.input,
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

  /** Draws it with the next frame, once for all changes until then. */
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

  /** Sets the job server's description of the job. */
  setOutside(outside) {
    this.job.outside = outside;
    this.touch();
  }

  update() {
    const { job } = this;
    say(this.heading, job.name);
    say(this.state, job.stateText);
    this.state.dataset.state = this.why.dataset.state = this.bar.dataset.state = job.state;
    say(this.why, job.why);
    this.why.hidden = !job.why;
    this.none.hidden = job.known;
    say(this.none, this.reason(job.outside));
    this.attempts.update((job.outside && job.outside.attempts) || []);
    this.body.hidden = this.facts.hidden = this.input.hidden = !job.known;
    if (!job.known) return;
    if (!job.metrics.includes(this.view.metric)) this.view.metric = job.metrics.includes(job.metric) ? job.metric : job.metrics[0];
    this.updateHead();
    this.charts.update(job);
    this.workers.update(job);
    this.events.update(job);
  }

  /** Why there are no charts. `outside`: the job server's description, if there is one. */
  reason(outside) {
    if (!outside) return "No job yet: the page begins when the model has been built.";
    if (outside.kind === "predict") return "A predict job has no charts.";
    return ENDED.includes(outside.state) ? "The job ended before it trained." : "The charts begin when the model has been built.";
  }

  updateHead() {
    const { now, facts, over } = this.job;
    const columns = facts.columns || [];
    this.fillLine(this.input, [
      facts.model && !this.job.name.startsWith(facts.model) && `model ${facts.model}`,
      facts.parameters && many(facts.parameters, "parameter"),
      now.rows && !facts.stream && many(now.rows, "row"),
      columns.length && `${columns.length === 1 ? "column" : `${columns.length} columns:`} ${columns.slice(0, COLUMNS_MAX).join(", ")}${columns.length > COLUMNS_MAX ? ", …" : ""}`,
    ]);
    const epochs = many(facts.epochs, "epoch") + (facts.stream ? " of each micro-batch" : "");
    this.fillLine(this.facts, [`rule ${inWords(facts.rule).join(", ")}`, many(facts.workers, "worker"), epochs, facts.batch_size && `mini-batches of ${facts.batch_size}`]);
    this.bar.max = facts.epochs;
    this.bar.value = Math.min(now.epochs, facts.epochs);
    this.bar.hidden = Boolean(facts.stream);
    const progress = facts.stream ? "A stream" : `Epoch ${this.bar.value.toFixed(2)} of ${facts.epochs}`;
    const passed = now.start === null || now.start === undefined ? [`${clock(now.at)} since the job began`] : [progress, clock(now.at), now.start > 0 && `after a start of ${clock(now.start)}`];
    this.fillLine(this.passed, [...passed, now.left !== null && !over && `${clock(now.left)} left`]);
    this.tiles.hidden = !now.commits && !(facts.stream && now.micro_batch);
    this.fillTiles();
  }

  /** Fills a line with the parts that are not empty. */
  fillLine(line, parts) {
    const texts = parts.filter(Boolean);
    if (line.textContent === texts.join(" · ")) return;
    line.replaceChildren(...texts.flatMap((text, place) => [place ? " · " : "", h("span", { text })]));
  }

  /** The numbers of the job, the monitored metric first. Retries are shown if there are any. */
  fillTiles() {
    const { job } = this;
    const { now } = job;
    const { label, value, note } = job.monitored;
    const retries = job.total("retries");
    const rate = job.over ? ["Samples/s", amount(job.meanRate, 3), `over all of ${clock(job.trained)}`] : ["Samples/s", amount(now.rate, 3), `over the last ${clock(now.rate_seconds)}`];
    const tiles = [
      [label, amount(value), note],
      label !== "Training loss" && ["Training loss", amount(job.latestMean()), job.over ? "latest mean" : "mean of recent commits"],
      ...(job.facts.stream ? this.streamTiles(now.micro_batch) : []),
      ...Object.entries(now.tables || {}).map(([name, [kept, admitted, expired, removed]]) => [`Rows of ${name}`, amount(kept), `${amount(admitted)} admitted, ${amount(expired)} expired, ${amount(removed)} removed`]),
      rate,
      ["Commits", amount(now.commits), `of ${many(now.samples, "sample")}`],
      !job.over && ["Workers", this.alive(), "that train"],
      retries > 0 && ["Retries", amount(retries), "taken over"],
      job.facts.saved && ["Snapshots", this.snapshots(), this.latestSnapshot()],
    ].filter(Boolean);
    while (this.tiles.children.length > tiles.length) this.tiles.lastChild.remove();
    tiles.forEach((texts, place) => {
      const tile = this.tiles.children[place] || h("div", {}, h("dt"), h("dd", { class: "value" }), h("dd", { class: "note" }));
      if (!tile.parentNode) this.tiles.append(tile);
      [0, 1, 2].forEach((part) => say(tile.children[part], texts[part] || ""));
    });
  }

  /** The state of a stream, from its latest micro-batch; null: there is none yet. */
  streamTiles(latest) {
    if (!latest) return [["Micro-batch", "–", "the latest"]];
    const { batch, rows, seconds, lag, backlog } = latest;
    const named = ([name, value]) => [name.replace(/[A-Z]/g, (letter) => ` ${letter.toLowerCase()}`), amount(value)];
    const [first, ...others] = Object.entries(backlog || {}).map(named);
    return [
      ["Micro-batch", amount(batch), `${amount(rows)} rows in ${amount(seconds, 3)} s`],
      ["Lag", isKnown(lag) ? `${amount(lag, 3)} s` : "–", "of the latest, at most"],
      first && ["Backlog", first[1], [first[0], ...others.map((one) => one.join(" "))].join(", ")],
    ];
  }

  alive() {
    const count = this.job.facts.workers;
    let training = 0;
    for (let worker = 0; worker < count; worker += 1) training += this.job.workerState(worker) === "training";
    return `${training} of ${count}`;
  }

  /** Whether the server can save its state. */
  snapshots() {
    return this.job.now.snapshots_fail ? "failing" : "on";
  }

  /** The commits in the latest snapshot, and its age. */
  latestSnapshot() {
    const { saved_commits: commits, saved_seconds: age } = this.job.now;
    if (this.job.over || commits === null || commits === undefined) return "";
    return `of ${amount(commits)} commits, ${clock(age)} ago`;
  }
}
