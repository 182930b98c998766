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
    if (told.outside[number]) view.setOutside(told.outside[number]);
  });
}
