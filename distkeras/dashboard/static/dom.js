// The elements of the page. Texts are set as text, never as HTML, because names and messages come from others.

/** An element with properties ("class", "text", "on…", aria and others as attributes) and children. */
function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") say(element, value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Sets an element's text, and the tooltip for the words in it. An equal text is not set, so nothing is laid out again. */
function say(element, text) {
  if (element.textContent === text) return;
  element.textContent = text;
  if (EXPLAINED.has(element.tagName)) element.title = meaningOf(text);
}

let unique = 0;

/** An id that is unique on the page. */
function freshId(name) {
  unique += 1;
  return `${name}-${unique}`;
}

/** A select with its label. */
function choice(label, options, value, onchange) {
  const id = freshId("choice");
  const select = h("select", { id });
  fillChoice(select, options, value);
  select.addEventListener("change", () => onchange(select.value));
  return { element: h("span", { class: "choice" }, h("label", { for: id, text: label }), select), select };
}

/** Gives a select its options, each a value and a text, and keeps the chosen one if it still exists. */
function fillChoice(select, options, value = select.value) {
  const filled = JSON.stringify(options);
  if (select.dataset.options !== filled) {
    select.dataset.options = filled;
    select.replaceChildren(...options.map(([key, text]) => h("option", { value: key, text })));
    select.value = options.some(([key]) => key === value) ? value : options[0][0];
  }
}

// ---- numbers as people read them

/** A quantity with about four digits; a dash if it is unknown. */
function amount(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  if (size !== 0 && size < 1e-3) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

/** A number of things: "1 commit", "2 commits". */
function many(count, word) {
  return `${amount(count)} ${word}${count === 1 ? "" : "s"}`;
}

/** Seconds as 1:02:03. */
function clock(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const whole = Math.max(0, Math.round(seconds));
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (number) => String(number).padStart(2, "0");
  if (hours >= 48) return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

/** A share as whole percent. */
function percent(share) {
  return Number.isFinite(share) ? `${Math.round(100 * share)} %` : "–";
}

/** A color of the style sheet, as it is now: light or dark. */
function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// ---- announcements of a screen reader: changes of the job's course, but no number that changes all the time

const announcements = h("div", { class: "aside", role: "status", "aria-live": "polite" });
const unannounced = [];
let announceTimer = 0;

/** Announces a text, at most every five seconds; texts that come in between are announced together. */
function announce(text) {
  unannounced.push(text);
  if (announceTimer) return;
  const speak = () => {
    if (!unannounced.length) {
      announceTimer = 0;
      return;
    }
    const more = unannounced.length > 3 ? ` And ${unannounced.length - 3} more.` : "";
    say(announcements, unannounced.slice(0, 3).join(" ") + more);
    unannounced.length = 0;
    announceTimer = setTimeout(speak, 5000);
  };
  announceTimer = setTimeout(speak, 300);
}
