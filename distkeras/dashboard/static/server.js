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
const chosen = new Map();
let listed = null;

async function ask(path, method = "GET") {
  const answer = await fetch(new URL(`${API}${path}`, location.href), { method, headers: headers(), cache: "no-store" });
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

/** The jobs, the latest first. Its rows stay where they are in the page, so that the focus stays too. */
class JobList {
  constructor() {
    this.rows = new Map();
    this.jobs = new Map();
    this.filter = { text: "", tag: "", state: "" };
    this.body = h("tbody");
    const heading = freshId("jobs");
    const head = h("thead", {}, h("tr", {}, ...["Show", "Name", "Tags", "State", "Created", "User"].map((text) => h("th", { scope: "col", text }))));
    this.table = h("table", {}, h("caption", { class: "aside", text: "Jobs" }), head, this.body);
    this.none = h("p", { class: "none", text: "No jobs yet." });
    this.more = h("button", { type: "button", text: "Show older jobs", hidden: true, onclick: () => this.readOlder() });
    const scroll = h("div", { class: "scroll", tabindex: 0, role: "group", "aria-labelledby": heading }, this.table, this.none, this.more);
    this.element = h("section", { class: "card list" }, h("div", { class: "head" }, h("h2", { id: heading, text: "Jobs" }), this.makeFilter()), scroll);
  }

  makeFilter() {
    const field = (name, label) => {
      const id = freshId("filter");
      const input = h("input", { id, type: "search", autocomplete: "off", spellcheck: "false" });
      let typing = 0;
      input.addEventListener("input", () => {
        clearTimeout(typing);
        typing = setTimeout(() => this.setFilter(name, input.value.trim()), TYPING_MS);
      });
      return h("span", { class: "choice" }, h("label", { for: id, text: label }), input);
    };
    const states = choice("State", [["", "all"], ...JOB_STATES.map((state) => [state, state])], "", (value) => this.setFilter("state", value));
    return h("div", { class: "tools" }, field("text", "Name or user"), field("tag", "Tag"), states.element);
  }

  setFilter(name, value) {
    this.filter[name] = value;
    this.jobs.clear();
    this.read();
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
    const sorted = [...this.jobs.values()].sort((one, other) => other.created - one.created);
    for (const [id, { row }] of this.rows) {
      if (this.jobs.has(id)) continue;
      row.remove();
      this.rows.delete(id);
    }
    sorted.forEach((job, number) => {
      if (!this.rows.has(job.id)) this.rows.set(job.id, jobRow(job));
      const { row, state } = this.rows.get(job.id);
      say(state, job.attempt > 1 ? `${job.state}, driver ${job.attempt}` : job.state);
      const before = this.body.children[number];
      if (before !== row) this.body.insertBefore(row, before || null);
    });
    this.table.hidden = !sorted.length;
    this.none.hidden = sorted.length > 0;
    say(this.none, Object.values(this.filter).some(Boolean) ? "No such jobs." : "No jobs yet.");
    this.more.hidden = !this.older;
  }

  /** Shows the jobs in the address, or the latest one if it has none. */
  async choose() {
    const wanted = location.hash.slice(1).split(",").filter((id) => /^[0-9a-f]{32}$/.test(id));
    const missing = [];
    for (const id of wanted) {
      try {
        toggleJob(this.jobs.get(id) || (await (await ask(`/jobs/${id}`)).json()), true);
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
  const state = h("td");
  const created = new Date(1000 * job.created).toLocaleString();
  const cells = [h("td", { text: job.tags.join(" ") }), state, h("td", { text: created }), h("td", { text: job.user })];
  return { row: h("tr", {}, h("td", {}, box), h("th", { scope: "row", text: name }), ...cells), state };
}

function nameOf(job) {
  return job.name || job.id.slice(0, 8);
}

function toggleJob(job, on) {
  const box = document.getElementById(`show-${job.id}`);
  if (box) box.checked = on;
  if (on && !chosen.has(job.id)) chosen.set(job.id, followJob(job));
  else if (!on && chosen.has(job.id)) {
    const { end, view } = chosen.get(job.id);
    end();
    view.remove();
    views.splice(views.indexOf(view), 1);
    chosen.delete(job.id);
    arrange();
  }
  history.replaceState(null, "", `#${[...chosen.keys()].join(",")}`);
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

/** The actions on a job: cancel it, submit it again, read its log, download its files. */
class JobActions {
  constructor(job) {
    this.job = job;
    this.timer = 0;
    const button = (text, onclick) => h("button", { type: "button", text, onclick });
    const id = freshId("log");
    this.cancel = button("Cancel", () => this.post("cancel"));
    this.again = button("Submit again", () => this.post("resubmit"));
    this.showLog = h("button", { type: "button", text: "Log", "aria-expanded": "false", "aria-controls": id, onclick: () => this.toggleLog() });
    this.files = [["Model", "model", "model.keras"], ["History", "history", "history.parquet"], ["Commits", "commits", "commits.parquet"]].map(
      ([text, path, name]) => button(text, () => this.download(path, `${job.id.slice(0, 8)}-${name}`))
    );
    this.page = button("Save as a file", () => this.download("page", `${job.id.slice(0, 8)}.html`));
    this.problem = h("p", { class: "why", role: "alert", hidden: true });
    this.log = h("pre", { class: "log scroll", id, tabindex: 0, "aria-label": `Log of ${nameOf(job)}`, hidden: true });
    this.element = h("div", { class: "actions" }, h("div", { class: "tools" }, this.cancel, this.again, this.showLog, ...this.files, this.page), this.problem, this.log);
    this.update(job);
  }

  update(job) {
    this.job = job;
    this.cancel.hidden = ENDED.includes(job.state) || job.cancelled;
    this.files.forEach((file) => { file.hidden = job.kind !== "train" || job.state !== "done"; });
    this.page.hidden = job.kind !== "train" || job.state === "queued";
  }

  async attempt(action) {
    try {
      this.problem.hidden = true;
      return await action();
    } catch (error) {
      say(this.problem, error.message);
      this.problem.hidden = false;
      return null;
    }
  }

  async post(action) {
    await this.attempt(async () => {
      const job = await (await ask(`/jobs/${this.job.id}/${action}`, "POST")).json();
      if (action === "cancel") this.update(job);
      else if (listed) {
        await listed.read();
        toggleJob(job, true);
      }
    });
  }

  async download(path, name) {
    await this.attempt(async () => {
      const blob = await (await ask(`/jobs/${this.job.id}/${path}`)).blob();
      const anchor = h("a", { href: URL.createObjectURL(blob), download: name });
      anchor.click();
      setTimeout(() => URL.revokeObjectURL(anchor.href), 10000);
    });
  }

  toggleLog() {
    this.log.hidden = !this.log.hidden;
    this.showLog.setAttribute("aria-expanded", String(!this.log.hidden));
    clearTimeout(this.timer);
    if (this.log.hidden) return;
    this.offset = -LOG_MAX;
    say(this.log, "");
    this.readLog();
  }

  async readLog() {
    const piece = await this.attempt(async () => (await ask(`/jobs/${this.job.id}/log?offset=${this.offset}`)).json());
    if (piece && piece.text) {
      const atEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
      say(this.log, (this.log.textContent + piece.text).slice(-LOG_MAX));
      if (atEnd) this.log.scrollTop = this.log.scrollHeight;
    } else if (piece && !this.log.textContent) say(this.log, "Nothing has been printed yet.");
    if (piece) this.offset = piece.next;
    const more = piece && piece.text;
    if (more || !ENDED.includes(this.job.state)) this.timer = setTimeout(() => this.readLog(), more ? 0 : LOOK_MS);
  }

  end() {
    clearTimeout(this.timer);
  }
}
