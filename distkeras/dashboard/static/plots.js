// One chart: its drawing, its legend, a slider that reads it out, and the same numbers as a table.

const TABLE_ROWS = 60;
/** The charts that are on the screen. The others are drawn when the browser has time, for pictures of the whole page. */
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) entry.target.plot.show(entry.isIntersecting);
}, { rootMargin: "200px" });
const sized = new ResizeObserver((entries) => {
  for (const entry of entries) entry.target.plot.resize();
});
const later = window.requestIdleCallback ? (draw) => requestIdleCallback(draw, { timeout: 1000 }) : (draw) => setTimeout(draw, 100);
const plots = new Set();
const rebuildAll = () => plots.forEach((plot) => plot.rebuild());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", rebuildAll);
for (const [event, printing] of [["beforeprint", true], ["afterprint", false]]) {
  addEventListener(event, () => {
    document.documentElement.classList.toggle("printing", printing); // paper has the light colors
    rebuildAll();
  });
}

/** The least width of a pause, and the distance of the lines that fill it, in pixels. */
const PAUSE_WIDTH = 5;
const PAUSE_LINES = 6;

/** Whether a value is drawn: null ends a line, and undefined is skipped. */
function isKnown(value) {
  return value !== null && value !== undefined;
}

/** The places of the values that have no neighbor to draw a line to, and so need a dot. */
function lonely(values) {
  const places = Object.keys(values).map(Number).filter((place) => values[place] !== undefined);
  return places.filter((at, place) => isKnown(values[at]) && ![places[place - 1], places[place + 1]].some((next) => isKnown(values[next])));
}

/** A scale from a fixed number to another one, or (null) to a little above the highest value. */
function rangeOf([low, high]) {
  return (u, lowest, highest) => [low, high === null ? (highest > low ? highest * 1.05 : low + 1) : high];
}

class Plot {
  /** `title`; `tools`: elements in its head; `height` in pixels. */
  constructor({ title, tools = [], height = 240 }) {
    /** The visible range of the x axis, [from, to]; null: all. The plots of `group` have the same range. */
    this.zoom = null;
    this.group = [this];
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
    this.closer = h("button", { type: "button", text: "Zoom in", "aria-label": `Zoom in: ${title}`, onclick: () => this.zoomIn() });
    this.whole = h("button", { type: "button", text: "Show all", "aria-label": `Show all: ${title}`, hidden: true, onclick: () => this.showAll() });
    this.caption = h("h3", { id: heading, text: title });
    this.element = h(
      "figure",
      { class: "plot", "aria-labelledby": heading },
      h("div", { class: "head" }, this.caption, h("div", { class: "tools" }, ...tools)),
      this.legend,
      this.target,
      h("div", { class: "under" }, this.slider, this.closer, this.whole),
      this.reading,
      this.details
    );
    plots.add(this);
    seen.observe(this.target);
    sized.observe(this.target);
  }

  /** Removes the chart from the page. */
  remove() {
    seen.unobserve(this.target);
    sized.unobserve(this.target);
    plots.delete(this);
    if (this.chart) this.chart.destroy();
    this.element.remove();
  }

  /**
   * Sets the content: `x`, with `xName` and `xText(value)`; `series`, each with `label`, `values`, `color` (a name of the
   * style sheet) and its style; `bands`; `log`; `pauses`, each with `from`, `to` and `seconds`; `summary`: the chart in a
   * sentence. A chart without values is hidden, unless it must `stay`, because its tools choose the values.
   */
  set(content) {
    if (this.content && this.content.xName !== content.xName) this.zoom = null;
    this.content = content;
    this.element.hidden = !content.stay && !content.series.some((line) => line.values.some(isKnown));
    this.stale = true;
    this.note = content.summary || "";
    if (!this.chart || this.chart.cursor.idx === null || this.chart.cursor.idx === undefined) this.follow(null);
    if (this.visible) this.draw();
    else later(() => this.draw());
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
    this.draw();
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
    const [first, last] = this.shown();
    Object.assign(this.slider, { min: first, max: last });
    if (document.activeElement !== this.slider) this.slider.value = last;
    else this.readOut(Number(this.slider.value));
    this.whole.hidden = !this.zoom;
    this.closer.hidden = last - first < 2;
    if (this.details.open) this.fillTable();
    performance.measure("distkeras draw", { start: began, end: performance.now() });
  }

  // ---- zoom

  /** The first and the last place in the visible range. */
  shown() {
    const { x } = this.content;
    if (!this.zoom) return [0, Math.max(0, x.length - 1)];
    const [from, to] = this.zoom;
    const first = Math.max(0, x.findIndex((value) => value >= from));
    return [first, Math.max(first, x.findLastIndex((value) => value <= to))];
  }

  /** Shows a part of the x axis, in all plots of the group; null: all of it. */
  zoomTo(range) {
    if (range && this.content.x.filter((value) => value >= range[0] && value <= range[1]).length < 2) return;
    for (const plot of this.group) {
      plot.zoom = range;
      plot.stale = true;
      if (plot.visible) plot.draw();
    }
  }

  /** Halves the visible range around the slider. */
  zoomIn() {
    const [first, last] = this.shown();
    const width = Math.max(1, Math.floor((last - first) / 2));
    const at = Math.min(last - width, Math.max(first, Number(this.slider.value) - Math.floor(width / 2)));
    this.zoomTo([this.content.x[at], this.content.x[at + width]]);
  }

  showAll() {
    this.zoomTo(null);
    this.closer.focus();
  }

  rangeOfX(low, high) {
    if (this.zoom) return this.zoom;
    if (this.content.xRange) return this.content.xRange;
    if (low === null) return [0, 1];
    const { x } = this.content;
    return x.length > 1 ? [low, high] : [x[0] - 1, x[0] + 1];
  }

  options(content) {
    const axis = { stroke: () => color("soft"), grid: { stroke: () => color("grid"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const numbers = (u, splits) => splits.map((value) => (value === null ? "" : amount(value, 3)));
    return {
      width: this.target.clientWidth,
      height: this.height,
      legend: { show: false },
      cursor: { drag: { x: true, y: false, setScale: false }, points: { size: 6 }, y: false, bind: { dblclick: () => () => this.zoomTo(null) } },
      scales: {
        x: { time: false, range: (u, low, high) => this.rangeOfX(low, high) },
        y: content.log ? { distr: 3 } : content.yRange ? { range: rangeOf(content.yRange) } : {},
      },
      axes: [
        { ...axis, space: 56, size: 30, ...(content.xSteps ? { incrs: content.xSteps } : {}), values: (u, splits) => splits.map(content.xText) },
        { ...axis, size: 58, values: numbers },
      ],
      bands: (content.bands || []).map(({ series, color: name }) => ({ series, fill: () => color(name) })),
      series: [{}, ...content.series.map((line) => this.styleOf(line))],
      hooks: {
        setCursor: [(u) => this.follow(u.cursor.idx)],
        setSelect: [(u) => this.select(u)],
        drawAxes: [(u) => this.drawPauses(u)],
      },
    };
  }

  /** Zooms to the part of the chart that the reader has marked with the pointer. */
  select(u) {
    const { left, width } = u.select;
    if (width < 4) return;
    u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.zoomTo([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
  }

  /** Hatches the pauses, and writes the length of each if there is room. */
  drawPauses(u) {
    const { ctx, bbox } = u;
    const ratio = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    Object.assign(ctx, { font: `${11 * ratio}px system-ui, sans-serif`, textAlign: "left", textBaseline: "top" });
    for (const { from, to, seconds, color: name = "soft" } of this.content.pauses || []) {
      const [start, end] = [from, to].map((value) => u.valToPos(value, "x", true));
      const width = Math.max(end - start, PAUSE_WIDTH * ratio);
      const left = (start + end - width) / 2;
      if (left + width < bbox.left || left > bbox.left + bbox.width) continue;
      ctx.save();
      ctx.beginPath();
      ctx.rect(left, bbox.top, width, bbox.height);
      ctx.clip();
      ctx.strokeStyle = color(name);
      ctx.globalAlpha = 0.45;
      ctx.lineWidth = ratio;
      ctx.beginPath();
      for (let y = bbox.top - width; y < bbox.top + bbox.height; y += PAUSE_LINES * ratio) {
        ctx.moveTo(left, y + width);
        ctx.lineTo(left + width, y);
      }
      ctx.stroke();
      ctx.restore();
      const text = pauseText(seconds);
      const room = bbox.left + bbox.width - left - width - 4 * ratio;
      ctx.fillStyle = color(name);
      if (!this.content.several && ctx.measureText(text).width < room) ctx.fillText(text, left + width + 4 * ratio, bbox.top + 2 * ratio);
    }
    ctx.restore();
  }

  styleOf(line) {
    const stroke = line.invisible ? "transparent" : () => color(line.color);
    const filter = (u, number, shown) => (shown || line.bars || line.invisible ? null : lonely(u.data[number]));
    const points = { show: Boolean(line.points), size: 7, fill: () => color(line.color), filter };
    const style = { label: line.label, stroke, width: line.width || 1.5, dash: line.dash, points };
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

  /** Shows the values at the place of the pointer, or the summary if it is at none. */
  follow(place) {
    if (document.activeElement === this.slider) return;
    say(this.reading, place === null || place === undefined ? this.note : this.textAt(place));
  }

  /** Shows the values at the place of the slider. */
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
      .filter((line) => line.label && isKnown(this.numbersOf(line)[place]))
      .map((line) => `${line.label} ${amount(this.numbersOf(line)[place])}${line.unit || ""}`);
    return `${xName} ${xText(x[place])}: ${parts.join(", ") || this.pauseAt(place) || "no value"}`;
  }

  /** The text for the pause that begins at a place; empty if none does. */
  pauseAt(place) {
    const pause = (this.content.pauses || []).find((one) => one.place === place);
    return pause ? pauseText(pause.seconds) : "";
  }

  /** The values of a line; if it is drawn on top of others, without those below it. */
  numbersOf(line) {
    return line.numbers ? line.numbers() : line.values;
  }

  fillTable() {
    if (!this.details.open || !this.content) return;
    const { x, xText, xName, series } = this.content;
    const shown = series.filter((line) => line.label);
    const [first, final] = this.shown();
    const step = Math.max(1, Math.ceil((final - first + 1) / TABLE_ROWS));
    const head = h("tr", {}, ...[xName, ...shown.map((line) => line.label)].map((text) => h("th", { scope: "col", text })));
    const rows = [];
    for (let place = first; place < Math.min(x.length, final + 1); place += 1) {
      const pause = this.pauseAt(place);
      if ((final - place) % step && !pause) continue;
      const cells = pause ? [h("td", { text: pause, colspan: shown.length })] : shown.map((line) => h("td", { text: amount(this.numbersOf(line)[place]) }));
      rows.push(h("tr", {}, h("th", { scope: "row", text: xText(x[place]) }), ...cells));
    }
    this.table.replaceChildren(h("caption", { class: "aside", text: this.title }), h("thead", {}, head), h("tbody", {}, ...rows));
  }
}

/** The length of a pause, which ends when another driver or server continues the job. */
function pauseText(seconds) {
  return `paused for ${clock(seconds)}`;
}
