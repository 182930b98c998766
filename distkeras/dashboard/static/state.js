// A job as the page knows it: the messages of its journal, put together.

const STATES = ["waiting", "training", "finished"];
const OVER = new Set(["done", "stopped", "failed", "interrupted", "cancelled", "lost", "removed"]);
const EVENTS_MAX = 500;
/** Kinds of events that are no trouble. */
const QUIET = new Set(["window", "stop"]);
/** Kinds that are told to whoever cannot see them come. */
const TOLD = new Set(["takeover", "restart", "standstill", "stall", "failed", "lost", "stop"]);

class JobState {
  constructor(name) {
    this.name = name;
    this.known = false;
    this.quantiles = new Map();
    this.evaluations = [];
    this.events = [];
  }

  /** Takes a message in. */
  apply(message) {
    if (message.kind === "whole") this.takeWhole(message);
    else if (message.kind === "more" && this.known) this.takeMore(message);
  }

  takeWhole(message) {
    const before = this.known ? this.now : null;
    Object.assign(this, message);
    this.known = true;
    this.quantiles.clear();
    this.tell(before, []);
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
    for (const name of ["used", "width", "now", "staleness", "kinds"]) this[name] = message[name];
    this.tell(before, message.events);
  }

  tell(before, events) {
    for (const [, , kind, , , text] of events) if (TOLD.has(kind)) sayAloud(`${kind}: ${text}.`);
    if (before && before.state !== this.now.state) {
      sayAloud(`The job is ${this.now.state}${this.now.why ? `: ${this.now.why}` : ""}.`);
    }
  }

  /** What it is in; the job server knows it also where the job's driver died without a word. */
  get state() {
    return (this.outside && this.outside.state) || (this.known ? this.now.state : "waiting");
  }

  get why() {
    return (this.outside && this.outside.why) || (this.known ? this.now.why : "");
  }

  get over() {
    return OVER.has(this.state);
  }

  /** Which buckets to draw, and where each lies along an axis: "time" (seconds), "commits" or "samples". */
  axis(kind) {
    const places = [];
    const x = [];
    let sum = 0;
    for (let place = 0; place < this.used; place += 1) {
      const commits = this.job.commits[place];
      sum += kind === "samples" ? this.job.samples[place] : commits;
      if (kind !== "time" && !commits) continue;
      places.push(place);
      x.push(kind === "time" ? place * this.width : sum);
    }
    return { places, x };
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

  /** What the center was worth, by bucket; null where nobody looked. */
  evaluated(metric) {
    const values = new Array(this.used).fill(null);
    for (const [at, , , found] of this.evaluations) {
      const value = found[metric];
      const place = Math.min(this.used - 1, Math.floor(at / this.width));
      if (value !== undefined && place >= 0) values[place] = value;
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

  /** How a worker is: what its row says, and whether it is silent for longer than it usually is. */
  workerState(worker) {
    const state = STATES[this.workers.state[worker]];
    const last = this.workers.last[worker];
    if (state !== "training" || this.over) return this.over && state === "training" ? "finished" : state;
    const commits = this.workers.commits[worker];
    const usual = commits ? this.now.at / commits : 0;
    return last !== null && this.now.at - last > Math.max(15, 5 * usual) ? "silent" : state;
  }

  /** Where the workers' time went: shares of compute, wait and wire. */
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
