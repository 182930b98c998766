// The buttons of a job on the job server's page.

/** The actions on a job: cancel it, submit it again, read its log, download its files. */
class JobActions {
  constructor(job) {
    this.job = job;
    this.timer = 0;
    const button = (text, onclick) => h("button", { type: "button", text, onclick });
    const id = freshId("log");
    this.cancel = button("Cancel", () => window.confirm(`Cancel the job ${nameOf(this.job)}?`) && this.post("cancel"));
    this.again = button("Submit again", () => this.toggleForm());
    this.changes = h("textarea", { id: freshId("changes"), rows: 12, spellcheck: "false" });
    const send = button("Submit", () => this.post("resubmit", this.changes.value));
    const label = h("label", { for: this.changes.id, text: "The description of the new job, as JSON; the model stays the same" });
    this.form = h("div", { class: "again", hidden: true }, label, this.changes, send);
    this.showLog = h("button", { type: "button", text: "Log", "aria-expanded": "false", "aria-controls": id, onclick: () => this.toggleLog() });
    this.files = [["Model", "model", "model.keras"], ["History", "history", "history.parquet"], ["Commits", "commits", "commits.parquet"]].map(
      ([text, path, name]) => button(text, () => this.download(path, `${job.id.slice(0, 8)}-${name}`))
    );
    this.page = button("Save as a file", () => this.download("page", `${job.id.slice(0, 8)}.html`));
    this.run = h("span", { class: "facts" });
    this.problem = h("p", { class: "why", role: "alert", hidden: true });
    this.log = h("pre", { class: "log scroll", id, tabindex: 0, "aria-label": `Log of ${nameOf(job)}`, hidden: true });
    this.element = h("div", { class: "actions" }, h("div", { class: "tools" }, this.cancel, this.again, this.showLog, ...this.files, this.page, this.run), this.problem, this.form, this.log);
    this.update(job);
  }

  update(job) {
    this.job = job;
    this.cancel.hidden = ENDED.includes(job.state) || job.cancelled;
    this.files.forEach((file) => { file.hidden = job.kind !== "train" || job.state !== "done"; });
    this.page.hidden = job.kind !== "train" || job.state === "queued";
    linkRun(this.run, job);
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

  async toggleForm() {
    await this.attempt(async () => {
      const { description } = await (await ask(`/jobs/${this.job.id}`)).json();
      this.changes.value = JSON.stringify(description, null, 2);
      this.form.hidden = !this.form.hidden;
    });
  }

  async post(action, body = undefined) {
    await this.attempt(async () => {
      const job = await (await ask(`/jobs/${this.job.id}/${action}`, "POST", body)).json();
      this.form.hidden = true;
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
