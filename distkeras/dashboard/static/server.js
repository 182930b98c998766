// The page of the job server: a token identifies the reader, and the address lists the visible jobs.

const KEY = "distkeras token";
const API = "api/v1";
/** Milliseconds from one look at the list of jobs, a job or its log to the next. */
const LOOK_MS = 3000;
/** Milliseconds without a key until a filter is applied. */
const TYPING_MS = 300;
const PAGE_ROWS = 50;
/** The most characters of a log that are shown: the latest ones. */
const LOG_MAX = 200000;
const JOB_STATES = ["queued", "starting", "training", "predicting", "done", "failed", "cancelled", "lost"];
const ENDED = ["done", "failed", "cancelled", "lost"];
/** The columns of the list, and the orders that one may choose. */
const HEADS = ["Show", "Name", "State", "Created", "Duration", "Ended", "Epoch", "Loss", "Why it ended", "Tags", "User", "Run"];
const SORTS = {
  created: (job) => -job.created,
  duration: (job) => -(secondsOf(job) ?? -1),
  ended: (job) => -(job.ended ?? Infinity),
  loss: (job) => lastEpoch(job).loss ?? Infinity,
  name: (job) => nameOf(job).toLowerCase(),
  state: (job) => JOB_STATES.indexOf(job.state),
};
const chosen = new Map();
let listed = null;

async function ask(path, method = "GET", body = undefined) {
  const kind = body === undefined ? {} : { "Content-Type": "application/json" };
  const answer = await fetch(new URL(`${API}${path}`, location.href), { method, body, headers: { ...headers(), ...kind }, cache: "no-store" });
  if (answer.status === 401) {
    sessionStorage.removeItem(KEY);
    throw new Error("The token is not valid.");
  }
  if (answer.ok) return answer;
  const { error } = await answer.json().catch(() => ({}));
  throw Object.assign(new Error(error ? error.message : `The server answers ${answer.status}.`), { status: answer.status });
}

function headers() {
  return { Authorization: `Bearer ${sessionStorage.getItem(KEY) || ""}` };
}

function beginServer() {
  if (sessionStorage.getItem(KEY)) showJobs();
  else askToken("");
}

function askToken(error) {
  const field = h("input", { type: "password", id: "token", autocomplete: "off", required: true, spellcheck: "false" });
  const alert = h("p", { class: "why", role: "alert", text: error, hidden: !error });
  const form = h("form", { class: "card login" }, h("h2", { text: "Sign in" }), h("label", { for: "token", text: "Your token" }), field, h("button", { type: "submit", text: "Show my jobs" }), alert);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, field.value.trim());
    showJobs();
  });
  tools.replaceChildren();
  say(link, "");
  views.splice(0).forEach((view) => view.remove());
  arrange();
  place.replaceChildren(form);
  field.focus();
}

/** The jobs, in the chosen order. The filter is in the page's address. Its rows stay where they are in the page, so that the focus stays too. */
class JobList {
  constructor() {
    this.rows = new Map();
    this.jobs = new Map();
    const given = new URLSearchParams(location.search);
    this.filter = Object.fromEntries(["text", "tag", "state"].map((name) => [name, given.get(name) || ""]));
    this.sort = given.get("sort") in SORTS ? given.get("sort") : "created";
    this.body = h("tbody");
    const heading = freshId("jobs");
    const head = h("thead", {}, h("tr", {}, ...HEADS.map((text) => h("th", { scope: "col" }, h("span", { class: text === "Show" ? "aside" : null, text })))));
    this.table = h("table", {}, h("caption", { class: "aside", text: "Jobs" }), head, this.body);
    this.none = h("p", { class: "none", text: "No jobs yet." });
    this.reach = h("p", { class: "none" });
    this.more = h("div", { class: "tools", hidden: true }, this.reach, h("button", { type: "button", text: "Show older jobs", onclick: () => this.readOlder() }));
    const scroll = h("div", { class: "scroll", tabindex: 0, role: "group", "aria-labelledby": heading }, this.table, this.none);
    this.element = h("section", { class: "card list" }, h("div", { class: "head" }, h("h2", { id: heading, text: "Jobs" }), this.makeFilter()), scroll, this.more);
  }

  makeFilter() {
    const field = (name, label) => {
      const id = freshId("filter");
      const input = h("input", { id, type: "search", autocomplete: "off", spellcheck: "false", value: this.filter[name] });
      let typing = 0;
      input.addEventListener("input", () => {
        clearTimeout(typing);
        typing = setTimeout(() => this.setFilter(name, input.value.trim()), TYPING_MS);
      });
      return h("span", { class: "choice" }, h("label", { for: id, text: label }), input);
    };
    const states = choice("State", [["", "all"], ...JOB_STATES.map((state) => [state, state])], this.filter.state, (value) => this.setFilter("state", value));
    const sorts = choice("Sort by", Object.keys(SORTS).map((name) => [name, name]), this.sort, (value) => {
      this.sort = value;
      this.address();
      this.take([]);
    });
    return h("div", { class: "tools" }, field("text", "Name or user"), field("tag", "Tag"), states.element, sorts.element);
  }

  /** Writes filter and order into the address, so that a link or a bookmark has them. */
  address() {
    const given = Object.entries({ ...this.filter, sort: this.sort === "created" ? "" : this.sort }).filter(([, value]) => value);
    const query = new URLSearchParams(given).toString();
    history.replaceState(null, "", `${location.pathname}${query && `?${query}`}${location.hash}`);
  }

  /** Lists the jobs that match; of the chosen ones, those that do not are no longer chosen. */
  setFilter(name, value) {
    this.filter[name] = value;
    this.address();
    [...chosen.values()].filter(({ job }) => !this.matches(job)).forEach(({ job }) => toggleJob(job, false));
    this.jobs.clear();
    this.read();
  }

  /** Whether the filter admits a job, as the server decides it. */
  matches(job) {
    const { text, tag, state } = this.filter;
    const names = [job.name, job.user].map((name) => name.toLowerCase());
    return (!state || job.state === state) && (!tag || job.tags.includes(tag)) && names.some((name) => name.includes(text.toLowerCase()));
  }

  /** Reads the latest jobs; those read before stay. */
  async read() {
    const asked = JSON.stringify(this.filter);
    const page = await this.fetchPage("");
    if (asked !== JSON.stringify(this.filter)) return; // another filter was set meanwhile
    if (!this.jobs.size) this.older = page.next;
    const found = new Set(page.jobs.map((job) => job.id));
    const oldest = page.next ? page.jobs[page.jobs.length - 1].created : 0;
    for (const [id, job] of this.jobs) {
      if (job.created >= oldest && !found.has(id) && !chosen.has(id)) this.jobs.delete(id); // removed from the server
    }
    this.take(page.jobs);
  }

  async readOlder() {
    const page = await this.fetchPage(this.older);
    this.older = page.next;
    this.take(page.jobs);
  }

  async fetchPage(before) {
    const given = Object.entries({ ...this.filter, before, limit: PAGE_ROWS }).filter(([, value]) => value);
    return (await ask(`/jobs?${new URLSearchParams(given)}`)).json();
  }

  take(jobs) {
    jobs.forEach((job) => this.jobs.set(job.id, job));
    const key = SORTS[this.sort];
    const sorted = [...this.jobs.values()].sort((one, other) => orderOf(key(one), key(other)) || other.created - one.created);
    for (const [id, { row }] of this.rows) {
      if (this.jobs.has(id)) continue;
      row.remove();
      this.rows.delete(id);
    }
    sorted.forEach((job, number) => {
      if (!this.rows.has(job.id)) this.rows.set(job.id, jobRow(job));
      const { row, cells } = this.rows.get(job.id);
      fillRow(cells, job);
      const before = this.body.children[number];
      if (before !== row) this.body.insertBefore(row, before || null);
    });
    this.table.hidden = !sorted.length;
    this.none.hidden = sorted.length > 0;
    say(this.none, Object.values(this.filter).some(Boolean) ? "No such jobs." : "No jobs yet.");
    this.more.hidden = !this.older;
    say(this.reach, `The latest ${many(sorted.length, "job")}, sorted by ${this.sort}.`);
  }

  /** Shows the jobs in the address, or the latest one if it has none. */
  async choose() {
    const wanted = location.hash.slice(1).split(",").filter((id) => /^[0-9a-f]{32}$/.test(id));
    const missing = [];
    for (const id of wanted) {
      try {
        const job = this.jobs.get(id) || (await (await ask(`/jobs/${id}`)).json());
        if (this.matches(job)) toggleJob(job, true);
        else missing.push(nameOf(job));
      } catch (error) {
        missing.push(id.slice(0, 8));
      }
    }
    if (missing.length) announce(`Not found: ${missing.join(", ")}.`);
    const [latest] = this.jobs.values();
    if (!wanted.length && latest) toggleJob(latest, true);
    this.chosen = wanted.length > 0 || latest !== undefined;
  }
}

async function showJobs() {
  const list = new JobList();
  listed = list;
  let begun = false;
  const look = async () => {
    try {
      await list.read();
      if (listed !== list) return; // signed out meanwhile
      if (!begun) {
        begun = true;
        tools.replaceChildren(h("button", { type: "button", text: "Sign out", onclick: () => signOut("") }));
        place.replaceChildren(list.element);
      }
      if (!list.chosen) await list.choose();
      showLink("live");
    } catch (error) {
      if (listed !== list) return;
      if (!begun || !sessionStorage.getItem(KEY)) {
        signOut(error.message);
        return;
      }
      showLink("away");
    }
    list.timer = setTimeout(look, LOOK_MS);
  };
  await look();
}

function signOut(error) {
  if (listed) clearTimeout(listed.timer);
  listed = null;
  sessionStorage.removeItem(KEY);
  for (const { end } of chosen.values()) end();
  chosen.clear();
  askToken(error);
}

function jobRow(job) {
  const name = nameOf(job);
  const box = h("input", { type: "checkbox", id: `show-${job.id}`, "aria-label": `show ${name}`, checked: chosen.has(job.id), onchange: () => toggleJob(job, box.checked) });
  const link = h("a", { href: `#${job.id}`, text: name, title: name, onclick: (event) => {
    event.preventDefault();
    [...chosen.keys()].filter((id) => id !== job.id).forEach((id) => toggleJob({ id }, false));
    toggleJob(job, true);
  } });
  const state = h("span", { class: "state" });
  const cells = { state, duration: h("td"), ended: h("td"), epoch: h("td"), loss: h("td"), why: h("td", { class: "reason" }), run: h("td") };
  const before = [h("td", {}, box), h("th", { scope: "row", class: "name" }, link), h("td", {}, state), h("td", { text: moment(job.created) })];
  const after = [h("td", { class: "tags", text: job.tags.join(" "), title: job.tags.join(" ") }), h("td", { text: job.user })];
  return { row: h("tr", {}, ...before, cells.duration, cells.ended, cells.epoch, cells.loss, cells.why, ...after, cells.run), cells };
}

/** Writes what changes while a job runs. */
function fillRow(cells, job) {
  const [seconds, numbers] = [secondsOf(job), lastEpoch(job)];
  const why = job.error || (job.summary && job.summary.stopped) || "";
  say(cells.state, job.attempt > 1 ? `${job.state} (${job.attempt})` : job.state);
  if (job.attempt > 1) cells.state.title = `driver ${job.attempt}`;
  cells.state.dataset.state = job.state;
  say(cells.duration, seconds === null ? "" : clock(seconds));
  say(cells.ended, job.ended ? moment(job.ended) : "");
  say(cells.epoch, numbers.epoch ?? "");
  say(cells.loss, numbers.loss === undefined || numbers.loss === null ? "" : numbers.loss.toPrecision(4));
  say(cells.why, why);
  cells.why.title = why;
  linkRun(cells.run, job);
}

/** Day and time; the year if it is another one. */
function moment(seconds) {
  const date = new Date(1000 * seconds);
  const year = date.getFullYear() === new Date().getFullYear() ? undefined : "numeric";
  return date.toLocaleString(undefined, { year, month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
}

/** Fills an element with the link to a job's run in MLflow, or with the run's name, if the job has one. */
function linkRun(element, { mlflow_run: run }) {
  if (!run || element.hasChildNodes()) return;
  const link = /^https?:/.test(run) ? h("a", { href: run, target: "_blank", rel: "noopener noreferrer" }, "MLflow") : h("span", {}, "MLflow");
  link.title = run;
  element.append(link);
}

/** The seconds for which a job has run; null: it has not begun. */
function secondsOf(job) {
  return job.started ? (job.ended || Date.now() / 1000) - job.started : null;
}

function lastEpoch(job) {
  return (job.summary && job.summary.last_epoch) || {};
}

function orderOf(one, other) {
  return one < other ? -1 : Number(one > other);
}

function nameOf(job) {
  return job.name || job.id.slice(0, 8);
}

function toggleJob(job, on) {
  const box = document.getElementById(`show-${job.id}`);
  if (box) box.checked = on;
  if (on && !chosen.has(job.id)) chosen.set(job.id, { ...followJob(job), job });
  else if (!on && chosen.has(job.id)) {
    const { end, view } = chosen.get(job.id);
    end();
    view.remove();
    views.splice(views.indexOf(view), 1);
    chosen.delete(job.id);
    arrange();
  }
  history.replaceState(null, "", `${location.pathname}${location.search}#${[...chosen.keys()].join(",")}`);
}

/** Follows a job's journal and the server's description of it, which is right even if a driver has died. */
function followJob(job) {
  const view = addJob(nameOf(job));
  view.named = true;
  const actions = new JobActions(job);
  view.why.after(actions.element);
  let timer = 0;
  const onstate = (state) => {
    if (state !== "refused") return showLink(state);
    clearTimeout(timer);
    return look();
  };
  const stop = follow(new URL(`${API}/jobs/${job.id}/stream`, location.href), headers, (message) => take(view, message), onstate);
  const look = async () => {
    try {
      const found = await (await ask(`/jobs/${job.id}`)).json();
      view.setOutside(found);
      actions.update(found);
      if (chosen.has(found.id)) chosen.get(found.id).job = found;
      if (listed && listed.jobs.has(found.id)) listed.take([found]);
      if (ENDED.includes(found.state)) return;
    } catch (error) {
      if (error.status === 404) {
        view.setOutside({ ...view.job.outside, state: "removed", error: null });
        actions.element.remove();
        return;
      }
      showLink("away");
    }
    timer = setTimeout(look, LOOK_MS);
  };
  look();
  return { view, end: () => { stop(); clearTimeout(timer); actions.end(); } };
}
