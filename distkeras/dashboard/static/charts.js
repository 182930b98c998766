// The charts of one job.

/** The most workers that have a line each; of more, the chart has the spread and one worker that the reader chooses. */
const LINES_MAX = 8;
const AXES = {
  time: ["Time", (value) => (value === null || value < 0 ? "" : clock(value))],
  commits: ["Commit", (value) => (value === null ? "" : amount(value))],
  samples: ["Samples", (value) => (value === null ? "" : amount(value))],
};
/** Seconds between two marks of the axis of time. */
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];
const ALONG = Object.keys(AXES).map((name) => [name, name]);
/** The least seconds over which the rate of samples is a mean: narrower buckets are combined. */
const RATE_SECONDS = 6;

class JobCharts {
  /** `view`: the reader's choices: axis, metric, scale, worker; `onchange` is called after another choice. */
  constructor(view, onchange) {
    this.view = view;
    const choose = (name) => (value) => {
      view[name] = value;
      onchange();
    };
    this.metric = choice("Metric", [["loss", "loss"]], "loss", choose("metric"));
    this.worker = choice("Worker", [["", "none"]], "", choose("worker"));
    this.scale = choice("Scale", [["linear", "linear"], ["log", "logarithmic"]], "linear", choose("scale"));
    this.axisChoice = choice("Along", ALONG, "time", choose("axis"));
    this.metrics = new Plot({
      title: "Loss and metrics",
      tools: [this.metric.element, this.worker.element, this.axisChoice.element, this.scale.element],
      height: 300,
    });
    this.rate = new Plot({ title: "Samples per second" });
    this.split = new Plot({ title: "Where the workers' time goes" });
    this.staleness = new Plot({ title: "Staleness of commits" });
    this.gap = new Plot({ title: "Gap" });
    this.scalePlot = new Plot({ title: "Scale of payloads" });
    this.microBatches = new Plot({ title: "Seconds of micro-batches" });
    this.all = [this.metrics, this.rate, this.split, this.staleness, this.gap, this.scalePlot, this.microBatches];
    const alike = this.all.filter((plot) => plot !== this.staleness);
    for (const plot of alike) plot.group = alike;
    this.element = h("div", { class: "charts" }, ...this.all.map((plot) => plot.element));
    this.metrics.element.classList.add("wide");
  }

  remove() {
    this.all.forEach((plot) => plot.remove());
  }

  update(job) {
    fillChoice(this.metric.select, job.metrics.map((name) => [name, name]), this.view.metric);
    const workers = Array.from({ length: job.places }, (_, worker) => [String(worker), worker < job.facts.workers ? String(worker) : job.nameOf(worker)]);
    fillChoice(this.worker.select, [["", "none"], ...workers], this.view.worker);
    this.worker.select.value = this.view.worker;
    const axis = job.axis(this.view.axis);
    this.drawMetrics(job, axis);
    this.drawRate(job, axis);
    this.drawSplit(job, axis);
    this.drawStaleness(job);
    this.drawMean(this.gap, job, axis, "gap");
    this.drawMean(this.scalePlot, job, axis, "scale");
    this.drawMicroBatches(job, axis);
  }

  base({ x, pauses }) {
    const [xName, xText] = AXES[this.view.axis];
    return { x, xName, xText, xSteps: this.view.axis === "time" ? STEPS : undefined, pauses };
  }

  drawMetrics(job, axis) {
    const { metric } = this.view;
    const at = axis.values;
    const chosen = this.view.worker === "" ? null : Number(this.view.worker);
    const series = [];
    const bands = [];
    if (job.places > 1 && job.places <= LINES_MAX) {
      job.lines[metric].forEach((line, worker) => {
        const width = worker === chosen ? 3 : 1;
        series.push({ label: job.nameOf(worker), values: at(line), color: `worker-${worker % LINES_MAX}`, width });
      });
    } else if (job.places > 1) {
      const [low, middle, high] = job.spread(metric);
      series.push({ label: "90th percentile", values: at(high), color: "band", invisible: true, hidden: true });
      series.push({ label: "10th percentile", values: at(low), color: "band", invisible: true, hidden: true });
      series.push({ label: "median worker", values: at(middle), color: "soft", width: 1, dash: [4, 4] });
      bands.push({ series: [1, 2], color: "band", label: `10th to 90th percentile of ${job.places} workers` });
      if (chosen !== null) {
        series.push({ label: job.nameOf(chosen), values: at(job.lines[metric][chosen]), color: "worker-0", width: 2 });
      }
    }
    series.push({ label: "all workers", values: at(job.means[metric]), color: "text", width: 2.5 });
    const evaluated = at(job.evaluated(metric));
    if (evaluated.some(isKnown)) {
      series.push({ label: "center, evaluated", values: evaluated, color: "accent", width: 2, points: true, dash: [6, 3] });
    }
    say(this.metrics.caption, job.metrics.length > 1 ? `Loss and metrics: ${metric}` : "Loss");
    const known = at(job.means[metric]).filter(isKnown);
    const last = known[known.length - 1];
    const [least, most] = [Math.min, Math.max].map((choose) => known.reduce((one, other) => choose(one, other), last));
    const summary = known.length ? `The latest mean of ${metric} over all workers is ${amount(last)}; they were between ${amount(least)} and ${amount(most)}.` : `No values of ${metric}.`;
    const stay = job.metrics.some((name) => job.means[name].some(isKnown));
    this.metrics.set({ ...this.base(axis), series, bands, stay, log: this.view.scale === "log" && known.every((value) => value > 0), summary });
  }

  drawRate(job, axis) {
    const values = axis.values(job.rates(RATE_SECONDS));
    const { now } = job;
    const summary = job.over
      ? `${amount(job.meanRate)} samples per second over the ${clock(job.trained)} of training.`
      : `${amount(now.rate)} samples per second over the last ${clock(now.rate_seconds)}.`;
    this.rate.set({ ...this.base(axis), series: [{ label: "samples per second", values, color: "accent", fill: "band" }], yRange: [0, null], summary });
  }

  drawSplit(job, axis) {
    const names = ["compute", "wait", "wire"];
    const sums = job.job.compute.map((_, place) => names.reduce((sum, name) => sum + job.job[name][place], 0));
    const share = (name) => axis.values(sums.map((sum, place) => (sum > 0 ? (100 * job.job[name][place]) / sum : null)));
    const shares = names.map(share);
    const upTo = (number) => shares[0].map((value, place) => (isKnown(value) ? shares.slice(0, number + 1).reduce((sum, line) => sum + line[place], 0) : value));
    const labels = ["computing", "waiting for other workers", "wire and server"];
    const series = [2, 1, 0].map((number) => ({ label: labels[number], values: upTo(number), numbers: undefined, color: `part-${number}`, fill: `part-${number}`, width: 0.5, unit: " %" }));
    series.forEach((line, place) => Object.defineProperty(line, "numbers", { value: () => shares[2 - place], enumerable: false }));
    const [compute, wait, wire] = job.timeShares();
    const summary = `Computing ${percent(compute)}, waiting for other workers ${percent(wait)}, wire and server ${percent(wire)}.`;
    this.split.set({ ...this.base(axis), series, yRange: [0, 100], summary });
  }

  /** The seconds of a stream's micro-batches, and the longest time that their rows waited. */
  drawMicroBatches(job, axis) {
    const { lag = [], micro_batch: took = [] } = job.job;
    const latest = (line) => amount(line.findLast(isKnown));
    const points = true;
    const series = took.some(isKnown)
      ? [
          { label: "lag", values: axis.values(lag), color: "soft", points },
          { label: "from the hand-over to the snapshot", values: axis.values(took), color: "accent", points },
        ]
      : [];
    this.microBatches.set({ ...this.base(axis), series, yRange: [0, null], summary: `The latest took ${latest(took)} seconds, and its lag was ${latest(lag)} seconds.` });
  }

  drawStaleness(job) {
    const { width, counts } = job.staleness;
    const x = counts.map((_, bin) => bin * width);
    const sum = counts.reduce((one, other) => one + other, 0);
    const mean = sum ? counts.reduce((all, count, bin) => all + count * (bin + (width - 1) / 2 / width) * width, 0) / sum : null;
    const summary = `${many(sum, "commit")}, of staleness ${amount(mean, 3)} on average.`;
    const xText = (value) => (value === null || value % 1 ? "" : width > 1 ? `${value}–${value + width - 1}` : String(value));
    const values = sum ? counts : [];
    this.staleness.set({ x, xName: "Staleness", xText, xRange: [0, Math.max(1, counts.length) * width], series: [{ label: "commits", values, color: "accent", bars: true }], yRange: [0, null], summary });
  }

  /** A mean over time. A scale that is always 1 is not shown. */
  drawMean(plot, job, axis, name) {
    const known = job.job[name].filter(isKnown);
    const values = name === "scale" && known.every((value) => value === 1) ? [] : axis.values(job.job[name]);
    plot.set({ ...this.base(axis), series: [{ label: name, values, color: "accent" }], summary: `The latest mean is ${amount(known[known.length - 1])}.` });
  }
}
