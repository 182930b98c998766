// The page: which jobs there are, and where what is told of them comes from.

const told = JSON.parse(document.getElementById("data").textContent);
const link = h("span", { class: "link" });
const tools = h("div", { class: "tools" });
const place = h("main", { class: "jobs" });
const views = [];
let comparison = null;

function begin() {
  const header = h("header", {}, h("h1", { text: "distkeras" }), link, tools);
  document.getElementById("page").replaceChildren(header, place, heard);
  ({ live: beginLive, saved: beginSaved, server: beginServer })[told.mode]();
}

/** Adds a job to the page. */
function addJob(name) {
  const view = new JobView(new JobState(name));
  views.push(view);
  place.append(view.element);
  arrange();
  view.update();
  return view;
}

/** Sets what stands where, for one job or several. */
function arrange() {
  place.classList.toggle("several", views.length > 1);
  if (comparison) comparison.remove();
  comparison = views.length > 1 ? new Comparison([...views]) : null;
  if (comparison) place.prepend(comparison.element);
}

/** Gives a job a message, and has what shows it drawn. */
function take(view, message) {
  view.job.apply(message);
  if (!view.named && view.job.known) {
    const rule = view.job.facts.rule;
    const alike = views.filter((other) => other.job.known && other.job.facts.rule === rule);
    view.job.name = alike.length > 1 ? `${rule}, ${alike.indexOf(view) + 1}` : rule;
  }
  view.touch();
  if (comparison) requestAnimationFrame(() => comparison && comparison.update());
  const first = views[0].job;
  if (first.known) document.title = `${first.state} · ${amount(first.now.loss, 3)} · distkeras`;
}

function showLink(state) {
  const texts = { live: "live", away: "not reachable; trying again", refused: "no longer served", saved: "saved" };
  say(link, texts[state]);
  link.dataset.state = state;
}

// ---- a page of the driver's own

function beginLive() {
  tools.append(h("a", { href: "job.html", download: "job.html", text: "Save as a file" }));
  told.streams.forEach((stream, number) => {
    const view = addJob(told.streams.length > 1 ? `Job ${number + 1}` : "Job");
    follow(new URL(stream, location.href), () => ({}), (message) => take(view, message), showLink);
  });
}

// ---- a file

function beginSaved() {
  showLink("saved");
  told.journals.forEach((journal, number) => {
    const view = addJob(told.names[number] || `Job ${number + 1}`);
    view.named = Boolean(told.names[number]);
    journal.forEach((message) => take(view, message));
    if (told.outside[number]) view.setOutside(...told.outside[number]);
  });
}

// ---- a page of the job server: jobs are chosen, and a token says who asks

const KEY = "distkeras token";
const API = "api/v1";
/** From one look at the list of jobs to the next. */
const LIST_MS = 3000;
const chosen = new Map();
let listing = 0;
let listed = null;

function headers() {
  return { Authorization: `Bearer ${sessionStorage.getItem(KEY) || ""}` };
}

async function ask(path) {
  const answer = await fetch(new URL(`${API}${path}`, location.href), { headers: headers(), cache: "no-store" });
  if (answer.status === 401) {
    sessionStorage.removeItem(KEY);
    throw new Error("The token is not valid.");
  }
  if (!answer.ok) throw Object.assign(new Error(`The server answers ${answer.status}.`), { status: answer.status });
  return answer;
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

/** The latest jobs; its rows stay where they are in the page, so that whoever is at one is not thrown out of it. */
class JobList {
  constructor() {
    this.rows = new Map();
    this.body = h("tbody");
    const heading = freshId("jobs");
    const head = h("thead", {}, h("tr", {}, ...["Show", "Name", "State", "Created", "User"].map((text) => h("th", { scope: "col", text }))));
    this.table = h("table", {}, h("caption", { class: "aside", text: "Jobs" }), head, this.body);
    this.none = h("p", { class: "none", text: "No jobs yet." });
    const scroll = h("div", { class: "scroll", tabindex: 0, role: "group", "aria-labelledby": heading }, this.table, this.none);
    this.element = h("section", { class: "card list" }, h("h2", { id: heading, text: "Jobs" }), scroll);
  }

  update(jobs) {
    const first = !this.rows.size;
    const found = new Set(jobs.map((job) => job.id));
    for (const [id, { row }] of this.rows) {
      if (found.has(id) || chosen.has(id)) continue;
      row.remove();
      this.rows.delete(id);
    }
    jobs.forEach((job, number) => {
      if (!this.rows.has(job.id)) this.rows.set(job.id, jobRow(job));
      const { row, state } = this.rows.get(job.id);
      say(state, job.state);
      const before = this.body.children[number];
      if (before !== row) this.body.insertBefore(row, before || null);
    });
    this.table.hidden = !this.rows.size;
    this.none.hidden = this.rows.size > 0;
    if (first) this.choose(jobs);
  }

  /** Shows the jobs that the address names, else the latest one. */
  choose(jobs) {
    const wanted = new Set(location.hash.slice(1).split(","));
    const shown = jobs.filter((job) => wanted.has(job.id));
    (shown.length ? shown : jobs.slice(0, 1)).forEach((job) => toggleJob(job, true));
  }
}

async function showJobs() {
  const list = new JobList();
  listed = list;
  const look = async () => {
    try {
      const { jobs } = await (await ask("/jobs?limit=100")).json();
      if (listed !== list) return; // signed out meanwhile
      if (!list.element.isConnected) {
        tools.replaceChildren(h("button", { type: "button", text: "Sign out", onclick: () => signOut("") }));
        place.replaceChildren(list.element);
      }
      list.update(jobs);
    } catch (error) {
      if (listed !== list) return;
      if (!list.element.isConnected || !sessionStorage.getItem(KEY)) {
        signOut(error.message);
        return;
      }
      showLink("away");
    }
    listing = setTimeout(look, LIST_MS);
  };
  await look();
}

function signOut(error) {
  listed = null;
  clearTimeout(listing);
  sessionStorage.removeItem(KEY);
  for (const { end } of chosen.values()) end();
  chosen.clear();
  askToken(error);
}

function jobRow(job) {
  const name = job.name || job.id.slice(0, 8);
  const box = h("input", { type: "checkbox", id: `show-${job.id}`, "aria-label": `show ${name}`, onchange: () => toggleJob(job, box.checked) });
  const state = h("td");
  const created = new Date(1000 * job.created).toLocaleString();
  return { row: h("tr", {}, h("td", {}, box), h("th", { scope: "row", text: name }), state, h("td", { text: created }), h("td", { text: job.user })), state };
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

/** Follows a job's journal, and the server's own word of its state, which counts where a driver died. */
function followJob(job) {
  const view = addJob(job.name || job.id.slice(0, 8));
  view.named = true;
  view.element.append(h("p", { class: "facts" }, h("button", { type: "button", text: "Save as a file", onclick: () => saveJob(job) })));
  let timer = 0;
  const onstate = (state) => {
    if (state !== "refused") return showLink(state);
    clearTimeout(timer);
    return look();
  };
  const stop = follow(new URL(`${API}/jobs/${job.id}/stream`, location.href), headers, (message) => take(view, message), onstate);
  const look = async () => {
    try {
      const { state, error, cancelled } = await (await ask(`/jobs/${job.id}`)).json();
      view.setOutside(state, error || (cancelled && state !== "cancelled" ? "asked to end" : ""));
      if (["done", "failed", "cancelled", "lost"].includes(state)) return;
    } catch (error) {
      if (error.status === 404) {
        view.setOutside("removed", "");
        return;
      }
      showLink("away");
    }
    timer = setTimeout(look, 3000);
  };
  look();
  return { view, end: () => { stop(); clearTimeout(timer); } };
}

async function saveJob(job) {
  const blob = await (await ask(`/jobs/${job.id}/page`)).blob();
  const anchor = h("a", { href: URL.createObjectURL(blob), download: `${job.id.slice(0, 8)}.html` });
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(anchor.href), 10000);
}

begin();
