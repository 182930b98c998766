// The charts of one job.

/** As many workers have a line each; of more, there is the spread, and one worker that is chosen. */
const LINES_MAX = 8;
const AXES = {
  time: ["Time", (value) => (value === null ? "" : clock(value))],
  commits: ["Commit", (value) => (value === null ? "" : amount(value))],
  samples: ["Samples", (value) => (value === null ? "" : amount(value))],
};
/** Seconds between two marks of the axis of time. */
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];
/** Seconds over which the rate of samples is a mean. */
const RATE_SECONDS = 6;

class JobCharts {
  /** `view`: what whoever looks has chosen: axis, metric, log, worker; `onchange` is told of another choice. */
  constructor(view, onchange) {
    this.view = view;
    const choose = (name) => (value) => {
      view[name] = value;
      onchange();
    };
    this.metric = choice("Metric", [["loss", "loss"]], "loss", choose("metric"));
    this.worker = choice("Worker", [["", "none"]], "", choose("worker"));
    this.scale = choice("Scale", [["linear", "linear"], ["log", "logarithmic"]], "linear", choose("scale"));
    this.axisChoice = choice("Along", [["time", "time"], ["commits", "commits"], ["samples", "samples"]], "time", choose("axis"));
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
    this.all = [this.metrics, this.rate, this.split, this.staleness, this.gap, this.scalePlot];
    this.element = h("div", { class: "charts" }, ...this.all.map((plot) => plot.element));
    this.metrics.element.classList.add("wide");
  }

  remove() {
    this.all.forEach((plot) => plot.remove());
  }

  update(job) {
    fillChoice(this.metric.select, job.metrics.map((name) => [name, name]), this.view.metric);
    const workers = Array.from({ length: job.facts.workers }, (_, worker) => [String(worker), String(worker)]);
    fillChoice(this.worker.select, [["", "none"], ...workers], this.view.worker);
    this.worker.select.value = this.view.worker;
    const axis = job.axis(this.view.axis);
    this.drawMetrics(job, axis);
    this.drawRate(job, axis);
    this.drawSplit(job, axis);
    this.drawStaleness(job);
    this.drawMean(this.gap, job, axis, "gap");
    this.drawMean(this.scalePlot, job, axis, "scale");
  }

  base({ x }) {
    const [xName, xText] = AXES[this.view.axis];
    return { x, xName, xText, xSteps: this.view.axis === "time" ? STEPS : undefined };
  }

  drawMetrics(job, axis) {
    const metric = job.metrics.includes(this.view.metric) ? this.view.metric : job.metrics[0];
    const at = (line) => axis.places.map((place) => line[place]);
    const chosen = this.view.worker === "" ? null : Number(this.view.worker);
    const series = [];
    const bands = [];
    if (job.facts.workers > 1 && job.facts.workers <= LINES_MAX) {
      job.lines[metric].forEach((line, worker) => {
        const width = worker === chosen ? 3 : 1;
        series.push({ label: `worker ${worker}`, values: at(line), color: `worker-${worker % LINES_MAX}`, width });
      });
    } else if (job.facts.workers > 1) {
      const [low, middle, high] = job.spread(metric);
      series.push({ label: "90th percentile", values: at(high), color: "band", invisible: true, hidden: true });
      series.push({ label: "10th percentile", values: at(low), color: "band", invisible: true, hidden: true });
      series.push({ label: "median worker", values: at(middle), color: "soft", width: 1, dash: [4, 4] });
      bands.push({ series: [1, 2], color: "band", label: `10th to 90th percentile of ${job.facts.workers} workers` });
      if (chosen !== null) {
        series.push({ label: `worker ${chosen}`, values: at(job.lines[metric][chosen]), color: "worker-0", width: 2 });
      }
    }
    series.push({ label: "all workers", values: at(job.means[metric]), color: "text", width: 2.5 });
    const evaluated = at(job.evaluated(metric));
    if (evaluated.some((value) => value !== null)) {
      series.push({ label: "center, evaluated", values: evaluated, color: "accent", width: 2, points: true, dash: [6, 3] });
    }
    say(this.metrics.caption, job.metrics.length > 1 ? `Loss and metrics: ${metric}` : "Loss");
    const known = at(job.means[metric]).filter((value) => value !== null);
    const last = known.length ? known[known.length - 1] : null;
    const [least, most] = [Math.min, Math.max].map((choose) => known.reduce((one, other) => choose(one, other), last));
    const summary = known.length ? `Of all workers, ${metric} is ${amount(last)} now; it was between ${amount(least)} and ${amount(most)}.` : "Nothing yet.";
    this.metrics.set({ ...this.base(axis), series, bands, log: this.view.scale === "log" && known.every((value) => value > 0), summary });
  }

  drawRate(job, axis) {
    // Over a few seconds: a worker that commits once a second has commits in some of them, and none in others.
    const about = Math.max(0, Math.round(RATE_SECONDS / job.width / 2));
    const values = axis.places.map((place) => {
      const first = Math.max(0, place - about);
      const last = Math.min(job.used - 1, place + about);
      // The bucket that time is in is not over.
      const seconds = Math.min((last + 1) * job.width, Math.max(job.now.at, last * job.width)) - first * job.width;
      const samples = job.job.samples.slice(first, last + 1).reduce((sum, count) => sum + count, 0);
      return seconds > 0 ? samples / seconds : null;
    });
    const total = job.job.samples.reduce((sum, count) => sum + count, 0);
    const summary = job.over
      ? `${amount(total / job.now.at)} samples a second over the whole job.`
      : `${amount(values.findLast((value) => value !== null))} samples a second over the last ${RATE_SECONDS} s.`;
    this.rate.set({ ...this.base(axis), series: [{ label: "samples per second", values, color: "accent", fill: "band" }], yRange: [0, null], summary });
  }

  drawSplit(job, axis) {
    const names = ["compute", "wait", "wire"];
    const rows = axis.places.map((place) => names.map((name) => job.job[name][place]));
    const share = (number) => rows.map((row) => {
      const sum = row[0] + row[1] + row[2];
      return sum > 0 ? (100 * row[number]) / sum : null;
    });
    const shares = names.map((_, number) => share(number));
    const upTo = (number) => shares[0].map((value, place) => (value === null ? null : shares.slice(0, number + 1).reduce((sum, line) => sum + line[place], 0)));
    const labels = ["computing", "waiting for other workers", "wire and server"];
    const series = [2, 1, 0].map((number) => ({ label: labels[number], values: upTo(number), numbers: undefined, color: `part-${number}`, fill: `part-${number}`, width: 0.5, unit: " %" }));
    series.forEach((line, place) => Object.defineProperty(line, "numbers", { value: () => shares[2 - place], enumerable: false }));
    const [compute, wait, wire] = job.timeShares();
    const summary = `Computing ${percent(compute)}, waiting for other workers ${percent(wait)}, wire and server ${percent(wire)}.`;
    this.split.set({ ...this.base(axis), series, yRange: [0, 100], summary });
  }

  drawStaleness(job) {
    const { width, counts } = job.staleness;
    const x = counts.map((_, bin) => bin * width);
    const sum = counts.reduce((one, other) => one + other, 0);
    const mean = sum ? counts.reduce((all, count, bin) => all + count * (bin + (width - 1) / 2 / width) * width, 0) / sum : null;
    const summary = `${amount(sum)} commits, of staleness ${amount(mean, 3)} on average.`;
    const xText = (value) => (value === null || value % 1 ? "" : width > 1 ? `${value}–${value + width - 1}` : String(value));
    this.staleness.set({ x, xName: "Staleness", xText, xRange: [0, Math.max(1, counts.length) * width], series: [{ label: "commits", values: counts, color: "accent", bars: true }], yRange: [0, null], summary });
  }

  /** A mean over time, where there is one. */
  drawMean(plot, job, axis, name) {
    const values = axis.places.map((place) => job.job[name][place]);
    const known = values.filter((value) => value !== null);
    // A factor that never is another one than 1 says nothing.
    const telling = known.length && !(name === "scale" && known.every((value) => value === 1));
    plot.element.hidden = !telling;
    if (telling) plot.set({ ...this.base(axis), series: [{ label: name, values, color: "accent" }], summary: `A mean of ${amount(known[known.length - 1])} now.` });
  }
}
