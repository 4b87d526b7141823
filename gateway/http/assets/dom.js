// Elements, tables and number formats that all parts of the dashboard use.
export const $ = id => document.getElementById(id);
const integers = new Intl.NumberFormat();
export const count = n => integers.format(Math.round(n));
export const rate = n => n == null ? "–" : n < 10 ? n.toFixed(1) : count(n);
export const ms = s => s == null ? "–" : s === 0 ? "0 ms" : s < 1 ? `${(1e3 * s).toFixed(s < .01 ? 1 : 0)} ms` : `${s.toFixed(s < 10 ? 2 : 0)} s`;
export const share = x => x == null || isNaN(x) ? "–" : `${(100 * x).toFixed(x < .1 && x ? 1 : 0)} %`;
const QUANTITY = /^(–|[\d.,]+ (ms|s|×|[KMGT]?i?B(\/s)?))$/; // a number with its unit

export function bytes(n) {
  if (n == null) return "–";
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (n < 1024) return `${n < 10 && unit !== "B" ? n.toFixed(1) : Math.round(n)} ${unit}`;
    n /= 1024;
  }
  return `${n.toFixed(1)} TiB`;
}

export function ago(seconds) {
  return seconds < 90 ? `${Math.max(1, Math.round(seconds))} s` : `${Math.round(seconds / 60)} min`;
}

export function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

export function svg(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

export function say(place, text, className) { // only what is new, which a screen reader then says
  if (place.textContent !== text) place.textContent = text;
  if (className !== undefined && place.className !== className) place.className = className;
}

export function replace(id, children) { // the control that had the focus has it again
  const key = $(id).contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  $(id).replaceChildren(...children);
  if (key !== undefined) focusOn(key);
}

export function focusOn(key) {
  const found = key === undefined ? null : document.querySelector(`[data-key="${CSS.escape(key)}"]`);
  (found || $("request")).focus({ preventScroll: true });
}

export function goTo(id) { // a chart, an instance or the map
  const place = $(id);
  if (!place) return;
  place.scrollIntoView({ block: "center" });
  place.focus({ preventScroll: true });
}

export function bar(total, ...parts) {
  const made = element("div", undefined, "bar");
  made.setAttribute("aria-hidden", "true"); // the numbers stand below
  for (const part of parts) {
    const filled = element("i");
    filled.style.width = total ? `${100 * part / total}%` : "0";
    made.append(filled);
  }
  return made;
}

export function table(title, columns, rows) {
  // Roles are named since a narrow screen shows rows as blocks, which are no table to some browsers then.
  const as = (name, role, text, className) => { const made = element(name, text, className); made.setAttribute("role", role); return made; };
  const made = element("section"), inner = as("table", "table"), head = element("thead"), names = as("tr", "row"), body = element("tbody");
  const kind = i => { const cell = (rows[0] || [])[i]; return typeof cell === "number" || QUANTITY.test(cell) ? "n" : ""; };
  columns.forEach((column, i) => names.append(as("th", "columnheader", column, kind(i))));
  for (const row of rows) {
    const tr = as("tr", "row");
    row.forEach((cell, i) => {
      const td = as("td", "cell", typeof cell === "number" ? integers.format(cell) : cell instanceof Node ? undefined : cell, kind(i));
      td.dataset.label = columns[i];
      if (cell instanceof Node) td.append(cell);
      tr.append(td);
    });
    body.append(tr);
  }
  head.append(names);
  inner.append(head, body);
  inner.setAttribute("aria-label", title);
  made.append(element("h2", title), inner);
  return made;
}

export const sum = values => values.reduce((a, b) => a + (b || 0), 0);
export function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[sorted.length >> 1] : null;
}
