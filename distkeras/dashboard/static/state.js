// The state of a job, from the messages of its journal.

const STATES = ["waiting", "training", "finished"];
const OVER = new Set(["done", "stopped", "failed", "interrupted", "cancelled", "lost", "removed"]);
const EVENTS_MAX = 500;
/** Kinds of events that are not a problem. */
const QUIET = new Set(["window", "lent", "stop"]);
/** Kinds of events that a screen reader announces. */
const ANNOUNCED = new Set(["takeover", "restart", "standstill", "stall", "failed", "lost", "stop"]);

class JobState {
  constructor(name) {
    this.name = name;
    this.known = false;
    this.quantiles = new Map();
    this.evaluations = [];
    this.events = [];
  }

  /** Applies a message of the journal. */
  apply(message) {
    if (message.kind === "whole") this.takeWhole(message);
    else if (message.kind === "more" && this.known) this.takeMore(message);
  }

  takeWhole(message) {
    const before = this.known ? this.now : null;
    Object.assign(this, message);
    this.known = true;
    this.quantiles.clear();
    this.announceChanges(before, []);
  }

  takeMore(message) {
    const before = this.now;
    const from = message.from;
    const join = (known, more) => {
      known.length = from;
      for (const value of more) known.push(value);
    };
    for (const name of this.metrics) {
      join(this.means[name], message.means[name]);
      message.lines[name].forEach((more, worker) => join(this.lines[name][worker], more));
    }
    for (const name of Object.keys(this.job)) join(this.job[name], message.job[name]);
    for (const known of this.quantiles.values()) known.forEach((line) => (line.length = Math.min(line.length, from)));
    message.workers.worker.forEach((worker, place) => {
      for (const name of Object.keys(message.workers)) {
        if (name !== "worker") this.workers[name][worker] = message.workers[name][place];
      }
    });
    this.events = this.events.concat(message.events).slice(-EVENTS_MAX);
    this.evaluations = this.evaluations.concat(message.evaluations);
    for (const name of ["used", "width", "now", "staleness", "kinds", "pauses"]) this[name] = message[name];
    this.announceChanges(before, message.events);
  }

  announceChanges(before, events) {
    for (const [, , kind, , , text] of events) if (ANNOUNCED.has(kind)) announce(`${kind}: ${text}.`);
    if (before && before.state !== this.now.state) {
      announce(`The job is ${this.now.state}${this.now.why ? `: ${this.now.why}` : ""}.`);
    }
  }

  /** Its state. That of the job server, in `outside`, comes first, because it is right even if the driver has died. */
  get state() {
    const own = this.known ? this.now.state : "waiting";
    const { state = own } = this.outside || {};
    return state === "training" && own === "starting" ? own : state;
  }

  /** Its state in words, with the phase of the start. */
  get stateText() {
    if (this.state === "stopped") return "stopped early";
    return this.state === "starting" && this.known && this.now.state === "starting" ? `starting: ${this.now.why}` : this.state;
  }

  get why() {
    const { error, cancelled, state } = this.outside || {};
    if (error) return error;
    if (cancelled && state !== "cancelled") return "cancellation requested";
    return this.known && this.now.state !== "starting" ? this.now.why : "";
  }

  /** Whether events of a kind are listed: the headline already has the failure of a job. */
  lists(kind) {
    return kind !== "failed" || this.state !== "failed";
  }

  /** The metric that is shown first: the one that a callback monitors, or the loss. */
  get metric() {
    const monitored = this.facts.monitor;
    return monitored && (this.metrics.includes(monitored) || this.lastEvaluation(monitored) !== null) ? monitored : this.metrics[0];
  }

  /** Its latest value, of the center if there are evaluations, with a label and a note. */
  get monitored() {
    const { metric } = this;
    const value = this.lastEvaluation(metric);
    const note = this.facts.monitor === metric ? `monitored by ${(this.evaluations[0] || [])[2] || "a callback"}` : "of the center";
    if (value !== null) return { label: `Validation ${metric}`, value, note };
    return { label: `Training ${metric}`, value: this.latestMean(metric), note: this.over ? "latest mean" : "mean of recent commits" };
  }

  /** Hyper-parameters and options by name. */
  get settings() {
    const { options, rule, workers, epochs, batch_size: size } = this.facts;
    const given = (this.outside && this.outside.description) || {};
    const asked = Object.entries({ data: given.data, time_budget: given.time_budget, early_stopping: given.early_stopping });
    const requested = asked.filter(([, value]) => value !== undefined && value !== null).map(([name, value]) => [name, typeof value === "string" ? value : JSON.stringify(value)]);
    const known = Object.keys(options || {}).length ? options : { rule, num_workers: workers, num_epoch: epochs, batch_size: size };
    return { ...known, ...Object.fromEntries(requested) };
  }

  get over() {
    return OVER.has(this.state);
  }

  /**
   * The buckets to draw, and the position of each on an axis: "time" (seconds), "commits" or "samples".
   *
   * After the last bucket before a pause comes the place -1, at which every line ends. `pauses` has the beginning and
   * the end of each pause, and its `place` in `x`; `values` returns the values of a line.
   */
  axis(kind) {
    const places = [];
    const x = [];
    const pauses = this.pauses.map(([from, to, seconds]) => ({ from, to, seconds, bucket: Math.floor(from / this.width) }));
    let sum = 0;
    for (let place = 0; place < this.used; place += 1) {
      const commits = this.job.commits[place];
      sum += kind === "samples" ? this.job.samples[place] : commits;
      if (kind === "time" || commits) {
        places.push(place);
        x.push(kind === "time" ? place * this.width : sum);
      }
      const paused = pauses.filter((pause) => pause.bucket === place);
      if (!paused.length) continue;
      const at = kind === "time" ? (place + 0.5) * this.width : sum + 0.5;
      for (const pause of paused) Object.assign(pause, { place: x.length }, kind === "time" ? {} : { from: at, to: at });
      places.push(-1);
      x.push(at);
    }
    const values = (line) => {
      let paused = false; // null ends a line, and undefined is passed over
      return places.map((place) => {
        const value = place < 0 ? null : line[place] ?? undefined;
        paused = place < 0 || (paused && value === undefined);
        return paused ? null : value;
      });
    };
    return { places, x, pauses, values };
  }

  /** The share `low`, the middle, and the share `high` of the workers' values of a metric, in each bucket. */
  spread(metric, low = 0.1, high = 0.9) {
    if (!this.quantiles.has(metric)) this.quantiles.set(metric, [[], [], []]);
    const found = this.quantiles.get(metric);
    const lines = this.lines[metric];
    for (let place = found[0].length; place < this.used; place += 1) {
      const values = [];
      for (const line of lines) if (line[place] !== null) values.push(line[place]);
      values.sort((one, other) => one - other);
      [low, 0.5, high].forEach((share, number) => {
        found[number].push(values.length ? values[Math.round(share * (values.length - 1))] : null);
      });
    }
    return found;
  }

  /** Seconds of training, without the pauses. */
  get trained() {
    return this.now.at - this.paused(0, this.now.at);
  }

  /** Samples per second of a job that has ended; null if it was too short. */
  get meanRate() {
    return this.trained > this.width ? this.now.samples / this.trained : null;
  }

  /** The latest mean of a metric over the workers; while the job runs, of the loss over the latest commits. */
  latestMean(metric = this.metrics[0]) {
    const running = !this.over && metric === this.metrics[0] && this.now.loss !== null;
    return running ? this.now.loss : (this.means[metric] || []).findLast((value) => value !== null);
  }

  /** Samples per second at each bucket, as a mean over `span` seconds around it, without those trained in the start. */
  rates(span) {
    const about = Math.round(span / this.width / 2);
    return this.job.samples.map((_, place) => {
      const first = Math.max(this.used > 1 ? 1 : 0, place - about);
      const last = Math.max(first, Math.min(this.used - 1, place + about));
      // The present bucket has not ended.
      const end = Math.min((last + 1) * this.width, Math.max(this.now.at, last * this.width));
      const seconds = end - first * this.width - this.paused(first * this.width, end);
      const samples = this.job.samples.slice(first, last + 1).reduce((sum, count) => sum + count, 0);
      const stands = this.paused(place * this.width, (place + 1) * this.width) >= this.width;
      return seconds > 0 && !stands ? samples / seconds : null;
    });
  }

  /** Seconds of pauses between two moments. */
  paused(start, end) {
    return this.pauses.reduce((sum, [from, to]) => sum + Math.max(0, Math.min(end, to) - Math.max(start, from)), 0);
  }

  /** The evaluations of the center, by bucket. */
  evaluated(metric) {
    const values = new Array(this.used).fill(null);
    for (const [at, , , found] of this.evaluations) {
      const value = found[metric];
      const place = Math.min(this.used - 1, Math.max(0, Math.floor(at / this.width)));
      if (value !== undefined && this.used) values[place] = value;
    }
    return values;
  }

  /** The latest such value; null: there is none. */
  lastEvaluation(metric) {
    for (let place = this.evaluations.length - 1; place >= 0; place -= 1) {
      const value = this.evaluations[place][3][metric];
      if (value !== undefined) return value;
    }
    return null;
  }

  /** The number of rows in the table of workers: of those with a partition, and of helpers, whose rows follow. */
  get places() {
    return this.facts.workers + (this.facts.helpers || 0);
  }

  /** The name of a worker or helper. */
  nameOf(place) {
    return place < this.facts.workers ? `worker ${place}` : `helper ${place - this.facts.workers}`;
  }

  /** The state of a worker: that of its row, "silent" if its last commit is too long ago, or "ended" with the job. */
  workerState(worker) {
    const state = STATES[this.workers.state[worker]];
    const last = this.workers.last[worker];
    if (this.over && state !== "finished") return "ended";
    if (state !== "training") return state;
    const commits = this.workers.commits[worker];
    const usual = commits ? this.now.at / commits : 0;
    return last !== null && this.now.at - last > Math.max(15, 5 * usual) ? "silent" : state;
  }

  /** The shares of the workers' time: compute, wait and wire. */
  timeShares(worker = null) {
    const parts = ["compute", "wait", "wire"].map((name) =>
      worker === null ? this.job[name].reduce((sum, value) => sum + value, 0) : this.workers[name][worker]
    );
    const sum = parts.reduce((one, other) => one + other, 0);
    return parts.map((part) => (sum > 0 ? part / sum : NaN));
  }

  /** A sum over a column of the workers. */
  total(name) {
    return this.workers[name].reduce((sum, value) => sum + value, 0);
  }
}
