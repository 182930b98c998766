// The page: its jobs, and the source of each one's records.

const pageData = JSON.parse(document.getElementById("data").textContent);
const link = h("span", { class: "link" });
const tools = h("div", { class: "tools" });
const place = h("main", { class: "jobs" });
const views = [];
let comparison = null;

function begin() {
  const header = h("header", {}, h("h1", { text: "distkeras" }), link, tools);
  document.getElementById("page").replaceChildren(header, place, wordList(), announcements);
  ({ live: beginLive, saved: beginSaved, server: beginServer })[pageData.mode]();
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

/** Arranges one job or several. */
function arrange() {
  place.classList.toggle("several", views.length > 1);
  if (comparison) comparison.remove();
  comparison = views.length > 1 ? new Comparison([...views]) : null;
  if (!comparison) return;
  views[0].element.before(comparison.element);
  comparison.update();
}

/** Gives a job a message, and draws the changes. */
function take(view, message) {
  view.job.apply(message);
  nameJobs();
  view.touch();
  if (comparison) requestAnimationFrame(() => comparison && comparison.update());
  const first = views[0].job;
  if (first.known) document.title = `${first.stateText} · ${first.monitored.label} ${amount(first.monitored.value, 3)} · ${first.name}`;
}

/** Names the jobs that have no name of their own: by model and rule, and by number if these are equal. */
function nameJobs() {
  const unnamed = views.filter((view) => !view.named && view.job.known);
  const titles = unnamed.map(({ job: { facts } }) => [facts.model, inWords(facts.rule)[0]].filter(Boolean).join(" with "));
  unnamed.forEach((view, place) => {
    const alike = titles.filter((title) => title === titles[place]).length > 1;
    const name = alike ? `${titles[place]}, ${views.indexOf(view) + 1}` : titles[place];
    if (view.job.name !== name) view.touch();
    view.job.name = name;
  });
}

function showLink(state) {
  const texts = { live: "live", away: "not reachable; trying again", refused: "no longer served", saved: "saved" };
  say(link, texts[state]);
  link.dataset.state = state;
}

// ---- the page of a driver

function beginLive() {
  tools.append(h("a", { href: "job.html", download: "job.html", text: "Save as a file" }));
  pageData.streams.forEach((stream, number) => {
    const view = addJob(pageData.streams.length > 1 ? `Job ${number + 1}` : "Job");
    follow(new URL(stream, location.href), () => ({}), (message) => take(view, message), showLink);
  });
}

// ---- a saved page

function beginSaved() {
  showLink("saved");
  pageData.journals.forEach((journal, number) => {
    const view = addJob(pageData.names[number] || `Job ${number + 1}`);
    view.named = Boolean(pageData.names[number]);
    journal.forEach((message) => take(view, message));
    if (pageData.outside[number]) view.setOutside(pageData.outside[number]);
  });
}
