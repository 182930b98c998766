// The tables of one job: its workers, and its events.

/** Columns of the workers' table: title, key for sorting, and text. */
const COLUMNS = [
  ["Worker", (job, worker) => worker, (job, worker) => String(worker)],
  ["State", (job, worker) => job.workerState(worker), (job, worker) => stateText(job, worker)],
  ["Epoch", (job, worker) => job.workers.epoch[worker], (job, worker) => epochText(job, worker)],
  ["Loss", (job, worker) => job.workers.loss[worker], (job, worker) => amount(job.workers.loss[worker])],
  ["Samples", (job, worker) => job.workers.samples[worker], (job, worker) => amount(job.workers.samples[worker])],
  ["Commits", (job, worker) => job.workers.commits[worker], (job, worker) => amount(job.workers.commits[worker])],
  ["Computes", (job, worker) => job.timeShares(worker)[0], (job, worker) => percent(job.timeShares(worker)[0])],
  ["Waits", (job, worker) => job.timeShares(worker)[1], (job, worker) => percent(job.timeShares(worker)[1])],
  ["Wire", (job, worker) => job.timeShares(worker)[2], (job, worker) => percent(job.timeShares(worker)[2])],
  ["Retries", (job, worker) => job.workers.retries[worker], (job, worker) => amount(job.workers.retries[worker])],
  ["Fenced", (job, worker) => job.workers.fenced[worker], (job, worker) => amount(job.workers.fenced[worker])],
  ["Skipped", (job, worker) => job.workers.skipped[worker], (job, worker) => amount(job.workers.skipped[worker])],
];

function stateText(job, worker) {
  const state = job.workerState(worker);
  return state === "silent" ? `silent for ${clock(job.now.at - job.workers.last[worker])}` : state;
}

function epochText(job, worker) {
  return job.workers.commits[worker] ? String(job.workers.epoch[worker] + 1) : "–";
}

class WorkersTable {
  constructor(view, onchange) {
    this.view = view;
    this.onchange = onchange;
    this.order = [];
    this.rows = [];
    this.sort = { column: 0, down: false };
    this.heads = COLUMNS.map(([title], column) => this.head(title, column));
    this.body = h("tbody");
    const table = h("table", { class: "workers" }, h("caption", { class: "aside", text: "Workers" }), h("thead", {}, h("tr", {}, ...this.heads)), this.body);
    const heading = freshId("workers");
    const scroll = h("div", { class: "scroll", tabindex: 0, role: "group", "aria-labelledby": heading }, table);
    this.element = h("section", { class: "card" }, h("h3", { id: heading, text: "Workers" }), scroll);
  }

  head(title, column) {
    const button = h("button", { type: "button", text: title, onclick: () => this.sortBy(column) });
    return h("th", { scope: "col", class: column > 1 ? "number" : "" }, button);
  }

  sortBy(column) {
    this.sort = { column, down: this.sort.column === column ? !this.sort.down : column > 1 };
    this.onchange();
  }

  update(job) {
    while (this.rows.length < job.places) this.rows.push(this.row(this.rows.length, job));
    this.rows.forEach((row, worker) => this.fill(row, job, worker));
    const [, key] = COLUMNS[this.sort.column];
    const keys = this.rows.map((_, worker) => key(job, worker));
    const order = this.rows.map((_, worker) => worker);
    const compare = (one, other) => (keys[one] === keys[other] ? one - other : (keys[one] ?? -Infinity) < (keys[other] ?? -Infinity) ? -1 : 1);
    order.sort((one, other) => (this.sort.down ? compare(other, one) : compare(one, other)));
    if (order.join() !== this.order.join()) {
      this.order = order;
      const held = document.activeElement;
      this.body.replaceChildren(...order.map((worker) => this.rows[worker].element));
      if (this.body.contains(held)) held.focus({ preventScroll: true });
    }
    this.heads.forEach((head, column) => {
      if (column !== this.sort.column) head.removeAttribute("aria-sort");
      else head.setAttribute("aria-sort", this.sort.down ? "descending" : "ascending");
    });
  }

  row(worker, job) {
    const pressed = () => {
      this.view.worker = this.view.worker === String(worker) ? "" : String(worker);
      this.onchange();
    };
    const button = h("button", { type: "button", text: worker < job.facts.workers ? String(worker) : job.nameOf(worker), "aria-label": `${job.nameOf(worker)}: show its line`, onclick: pressed });
    const cells = COLUMNS.slice(1).map((_, column) => h("td", { class: column ? "number" : "" }));
    return { button, cells, element: h("tr", {}, h("th", { scope: "row" }, button), ...cells) };
  }

  fill({ button, cells, element }, job, worker) {
    const chosen = this.view.worker === String(worker);
    button.setAttribute("aria-pressed", chosen);
    element.classList.toggle("chosen", chosen);
    cells.forEach((cell, column) => say(cell, COLUMNS[column + 1][2](job, worker)));
    const state = job.workerState(worker);
    if (cells[0].dataset.state !== state) cells[0].dataset.state = state;
  }
}

class EventsTable {
  constructor(onchange) {
    this.kind = "";
    this.filled = "";
    this.choice = choice("Kind", [["", "all"]], "", (value) => {
      this.kind = value;
      onchange();
    });
    const heading = freshId("events");
    const titles = ["Time", "Kind", "Worker", "Attempt", "What happened"];
    this.body = h("tbody");
    const head = h("thead", {}, h("tr", {}, ...titles.map((text, column) => h("th", { scope: "col", class: [0, 2, 3].includes(column) ? "number" : "", text }))));
    this.table = h("table", { class: "events" }, h("caption", { class: "aside", text: "Events" }), head, this.body);
    this.scroll = h("div", { class: "scroll", tabindex: 0, role: "group", "aria-labelledby": heading }, this.table);
    this.none = h("p", { class: "none", text: "No events." });
    this.element = h(
      "section",
      { class: "card" },
      h("div", { class: "head" }, h("h3", { id: heading, text: "Events" }), h("div", { class: "tools" }, this.choice.element)),
      this.none,
      this.scroll
    );
  }

  update(job) {
    const kinds = Object.entries(job.kinds).filter(([kind]) => job.lists(kind)).sort();
    fillChoice(this.choice.select, [["", "all"], ...kinds.map(([kind, count]) => [kind, `${kind} (${count})`])], this.kind);
    this.kind = this.choice.select.value;
    const events = job.events.filter(([, , kind]) => job.lists(kind));
    const filled = `${this.kind} ${events.length} ${events.at(-1)} ${job.now.start}`;
    this.none.hidden = events.length > 0;
    this.scroll.hidden = this.choice.element.hidden = !events.length;
    if (filled === this.filled) return;
    this.filled = filled;
    const shown = events.filter(([, , kind]) => !this.kind || kind === this.kind).reverse();
    this.body.replaceChildren(...shown.map((event) => this.row(event, job)));
  }

  row([at, source, kind, worker, attempt, text], job) {
    return h(
      "tr",
      { class: QUIET.has(kind) || /are written again$/.test(text) ? "quiet" : "trouble" },
      h("td", { class: "number", text: at < 0 ? "start" : clock(at) }),
      h("td", {}, h("span", { class: "kind", text: kind, title: `${meaningOf(kind)}\nreported by the ${source}`.trim() })),
      h("td", { class: "number", text: worker === null ? "" : worker < job.facts.workers ? String(worker) : job.nameOf(worker) }),
      h("td", { class: "number", text: attempt === null ? "" : String(attempt) }),
      h("td", { class: "text", text })
    );
  }
}

/** The drivers of a job on the job server, in order. */
class AttemptsTable {
  constructor() {
    this.filled = "";
    this.body = h("tbody");
    const heading = freshId("attempts");
    const head = h("tr", {}, ...["Driver", "Started", "Ended", "Ran for", "How it ended"].map((text) => h("th", { scope: "col", text })));
    const table = h("table", { class: "attempts" }, h("caption", { class: "aside", text: "Drivers" }), h("thead", {}, head), this.body);
    const scroll = h("div", { class: "scroll", tabindex: 0, role: "group", "aria-labelledby": heading }, table);
    this.element = h("section", { class: "card", hidden: true }, h("h3", { id: heading, text: "Drivers" }), scroll);
  }

  update(attempts) {
    this.element.hidden = !attempts.length;
    const filled = JSON.stringify(attempts);
    if (filled === this.filled) return;
    this.filled = filled;
    this.body.replaceChildren(...attempts.map((attempt) => this.row(attempt)));
  }

  row({ attempt, started, ended, outcome }) {
    const time = (seconds) => (seconds === null ? "" : new Date(1000 * seconds).toLocaleString());
    const cells = [time(started), time(ended), ended === null ? "" : clock(ended - started)];
    const last = h("td", { class: "text", text: outcome || "is at work" });
    return h("tr", {}, h("th", { scope: "row", text: String(attempt) }), ...cells.map((text) => h("td", { text })), last);
  }
}
