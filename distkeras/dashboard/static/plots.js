// One chart: its drawing, its legend, a slider that reads it out, and the same numbers as a table.

const TABLE_ROWS = 60;
/** The charts that are on the screen; others are drawn when they come there. */
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) entry.target.plot.show(entry.isIntersecting);
}, { rootMargin: "200px" });
const sized = new ResizeObserver((entries) => {
  for (const entry of entries) entry.target.plot.resize();
});
const plots = new Set();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const plot of plots) plot.rebuild();
});

/** A scale from a fixed number to another one, or (null) to a little above the highest value. */
function rangeOf([low, high]) {
  return (u, lowest, highest) => [low, high === null ? (highest > low ? highest * 1.05 : low + 1) : high];
}

class Plot {
  /** `title`; `tools`: elements beside it; `height` in pixels. */
  constructor({ title, tools = [], height = 240 }) {
    const heading = freshId("plot");
    this.title = title;
    this.height = height;
    this.visible = false;
    this.content = null;
    this.chart = null;
    this.target = h("div", { class: "drawing", role: "img", "aria-label": title });
    this.target.plot = this;
    this.legend = h("ul", { class: "legend" });
    this.slider = h("input", { type: "range", min: 0, max: 0, value: 0, class: "reader", "aria-label": `${title}: read out` });
    this.slider.addEventListener("input", () => this.readOut(Number(this.slider.value)));
    this.slider.addEventListener("focus", () => this.readOut(Number(this.slider.value)));
    this.reading = h("p", { class: "reading" });
    this.note = "";
    this.table = h("table");
    this.details = h("details", {}, h("summary", { text: "As a table" }), h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": `${title}, as a table` }, this.table));
    this.details.addEventListener("toggle", () => this.fillTable());
    this.caption = h("h3", { id: heading, text: title });
    this.element = h(
      "figure",
      { class: "plot", "aria-labelledby": heading },
      h("div", { class: "head" }, this.caption, h("div", { class: "tools" }, ...tools)),
      this.legend,
      this.target,
      this.slider,
      this.reading,
      this.details
    );
    plots.add(this);
    seen.observe(this.target);
    sized.observe(this.target);
  }

  /** Ends it. */
  remove() {
    seen.unobserve(this.target);
    sized.unobserve(this.target);
    plots.delete(this);
    if (this.chart) this.chart.destroy();
    this.element.remove();
  }

  /**
   * Sets what is drawn: `x`, with `xName` and `xText(value)`; `series`, each with `label`, `values`, `color` (a name of
   * the style sheet) and how it is drawn; `bands`; `log`; `summary`: the chart in a sentence.
   */
  set(content) {
    this.content = content;
    this.stale = true;
    this.note = content.summary || "";
    if (!this.chart || this.chart.cursor.idx === null || this.chart.cursor.idx === undefined) this.follow(null);
    if (this.visible) this.draw();
  }

  show(visible) {
    this.visible = visible;
    if (visible) this.draw();
  }

  resize() {
    const width = this.target.clientWidth;
    if (this.chart && width && width !== this.chart.width) this.chart.setSize({ width, height: this.height });
  }

  rebuild() {
    this.signature = "";
    this.stale = true;
    if (this.visible) this.draw();
  }

  draw() {
    const { content } = this;
    if (!content || !this.stale || !this.target.clientWidth) return;
    this.stale = false;
    const began = performance.now();
    const data = [content.x, ...content.series.map((line) => line.values)];
    const styles = content.series.map(({ values, ...style }) => style);
    const signature = JSON.stringify([styles, content.bands, content.log, content.xName, content.yRange]);
    if (signature !== this.signature) {
      this.signature = signature;
      if (this.chart) this.chart.destroy();
      this.chart = new uPlot(this.options(content), data, this.target);
      this.fillLegend(content);
    } else {
      this.chart.setData(data);
    }
    this.target.setAttribute("aria-label", `${this.title}. ${content.summary || ""}`);
    this.slider.max = Math.max(0, content.x.length - 1);
    if (document.activeElement !== this.slider) this.slider.value = this.slider.max;
    else this.readOut(Number(this.slider.value));
    if (this.details.open) this.fillTable();
    performance.measure("distkeras draw", { start: began, end: performance.now() });
  }

  options(content) {
    const axis = { stroke: () => color("soft"), grid: { stroke: () => color("grid"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const numbers = (u, splits) => splits.map((value) => (value === null ? "" : amount(value, 3)));
    return {
      width: this.target.clientWidth,
      height: this.height,
      legend: { show: false },
      cursor: { drag: { x: true, y: false }, points: { size: 6 }, y: false },
      scales: {
        x: { time: false, ...(content.xRange ? { range: () => this.content.xRange } : {}) },
        y: content.log ? { distr: 3 } : content.yRange ? { range: rangeOf(content.yRange) } : {},
      },
      axes: [
        { ...axis, space: 70, size: 30, ...(content.xSteps ? { incrs: content.xSteps } : {}), values: (u, splits) => splits.map(content.xText) },
        { ...axis, size: 58, values: numbers },
      ],
      bands: (content.bands || []).map(({ series, color: name }) => ({ series, fill: () => color(name) })),
      series: [{}, ...content.series.map((line) => this.styleOf(line))],
      hooks: { setCursor: [(u) => this.follow(u.cursor.idx)] },
    };
  }

  styleOf(line) {
    const stroke = line.invisible ? "transparent" : () => color(line.color);
    const points = line.points ? { show: true, size: 7, fill: () => color(line.color) } : { show: false };
    const style = { label: line.label, stroke, width: line.width || 1.5, dash: line.dash, points, spanGaps: true };
    if (line.fill) style.fill = () => color(line.fill);
    if (line.bars) Object.assign(style, { paths: uPlot.paths.bars({ size: [0.9, 48], align: 1 }), fill: stroke });
    return style;
  }

  fillLegend(content) {
    const shown = content.series.filter((line) => line.label && !line.hidden);
    this.legend.hidden = shown.length + (content.bands || []).length < 2;
    const entries = shown.map((line) => {
      const swatch = h("span", { class: `swatch ${line.dash ? "dashed" : ""} ${line.bars || line.fill ? "full" : ""}` });
      swatch.style.color = `var(--${line.fill || line.color})`;
      return h("li", {}, swatch, h("span", { text: line.label }));
    });
    for (const band of content.bands || []) {
      const swatch = h("span", { class: "swatch full" });
      swatch.style.color = `var(--${band.color})`;
      entries.push(h("li", {}, swatch, h("span", { text: band.label })));
    }
    this.legend.replaceChildren(...entries);
  }

  /** The pointer is at a place of the chart, or at none. */
  follow(place) {
    if (document.activeElement === this.slider) return;
    say(this.reading, place === null || place === undefined ? this.note : this.textAt(place));
  }

  /** The slider is at a place. */
  readOut(place) {
    if (!this.content || !this.content.x.length) return;
    const text = this.textAt(Math.min(place, this.content.x.length - 1));
    say(this.reading, text);
    this.slider.setAttribute("aria-valuetext", text);
    if (this.chart) this.chart.setCursor({ left: this.chart.valToPos(this.content.x[place], "x"), top: 10 }, false);
  }

  textAt(place) {
    const { x, xText, xName, series } = this.content;
    const parts = series
      .filter((line) => line.label && this.numbersOf(line)[place] !== null && this.numbersOf(line)[place] !== undefined)
      .map((line) => `${line.label} ${amount(this.numbersOf(line)[place])}${line.unit || ""}`);
    return `${xName} ${xText(x[place])}: ${parts.join(", ") || "nothing"}`;
  }

  /** What a line means, where it is drawn on top of others. */
  numbersOf(line) {
    return line.numbers ? line.numbers() : line.values;
  }

  fillTable() {
    if (!this.details.open || !this.content) return;
    const { x, xText, xName, series } = this.content;
    const shown = series.filter((line) => line.label);
    const step = Math.max(1, Math.ceil(x.length / TABLE_ROWS));
    const head = h("tr", {}, ...[xName, ...shown.map((line) => line.label)].map((text) => h("th", { scope: "col", text })));
    const rows = [];
    for (let place = (x.length - 1) % step; place >= 0 && place < x.length; place += step) {
      const cells = shown.map((line) => h("td", { text: amount(this.numbersOf(line)[place]) }));
      rows.push(h("tr", {}, h("th", { scope: "row", text: xText(x[place]) }), ...cells));
    }
    this.table.replaceChildren(h("caption", { class: "aside", text: this.title }), h("thead", {}, head), h("tbody", {}, ...rows));
  }
}
