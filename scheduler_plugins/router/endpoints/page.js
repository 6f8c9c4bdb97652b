// SPDX-License-Identifier: Apache-2.0
"use strict";
const byId = (id) => document.getElementById(id);
const SVG = "http" + "://www.w3.org/2000/svg";  // a name, no address: nothing is loaded

// Numbers for people.
const number = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${number(value * 1000)} ms`;
  return value < 120 ? `${number(value)} s` : `${number(value / 60)} min`;
}
function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${number(value)} ${units[unit]}`;
}
function share(part, whole) {
  const percent = (100 * part) / whole;
  return whole ? `${percent > 0 && percent < 10 ? percent.toFixed(1) : Math.round(percent)} %` : "–";
}
function ago(value) {
  if (value < 120) return `${Math.max(0, value)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${Math.round(value / 3600)} h`;
}
const short = (url) => url.replace(/^https?:\/\//, "");

// Elements. Text comes from engines: it is never read as HTML.
function make(tag, kind = "", text = "") {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  if (text) made.textContent = text;
  return made;
}
function say(element, text) { if (element.textContent !== text) element.textContent = text; }
function keep(parent, wanted, key, create, update) {  // one child for each item, in order; known ones stay
  const known = new Map();
  for (const child of [...parent.children])
    if (known.has(child.dataset.key)) child.remove();
    else known.set(child.dataset.key, child);
  let place = parent.firstChild;
  for (const item of wanted) {
    const name = key(item);
    let child = known.get(name);
    known.delete(name);
    if (!child) { child = create(item); child.dataset.key = name; }
    if (child === place) place = place.nextSibling;
    else parent.insertBefore(child, place);
    update(child, item);
  }
  for (const child of known.values()) child.remove();
}

// What is wrong.
const MOST_NAMED = 4;
function showTroubles(troubles) {
  byId("troubles").hidden = !troubles.length;
  keep(byId("wrong"), troubles, (one) => `${one.alert} ${one.what} ${one.do}`,
    (one) => {
      const made = make("li", one.level);
      made.append(make("span", `level ${one.level}`, one.level), make("p", "what"), make("ul", "where"), make("p", "do"));
      return made;
    },
    (made, one) => {
      const [, what, where, todo] = made.children;
      say(what, one.what);
      const rest = one.where.length - MOST_NAMED;
      const named = rest > 1 ? [...one.where.slice(0, MOST_NAMED), `and ${rest} more`] : one.where;
      keep(where, named.entries(), ([n]) => String(n), () => make("li"), (line, [, text]) => say(line, text));
      if (todo.dataset.text === one.do) return;
      todo.dataset.text = one.do;
      todo.replaceChildren(`${one.do} `, make("code", "", `docs/alerts.md#${one.alert.toLowerCase()}`));
    });
}

// Sparklines.
const TILES = [
  { title: "Time to first token", tone: "prefill", main: "ttft_s", second: "ttft_high_s", text: seconds },
  { title: "Time per token", tone: "decode", main: "tpot_s", second: "tpot_high_s", text: seconds },
  { title: "Requests", tone: "decode", main: "requests", refused: "refused", text: (value) => `${number(value)} /s` },
  { title: "KV handed over", tone: "kv", main: "kv_bytes", text: (value) => `${bytes(value)}/s` },
  { title: "Chunks from KV pools", tone: "kv", main: "pool_hits", text: (value) => `${number(value)} /s`, ifAny: true },
];
function path(values, top) {
  const wide = 100 / (values.length - 1), high = (value) => (30 - (28 * value) / top).toFixed(2);
  let found = "", joined = false;
  values.forEach((value, n) => {
    if (value === null) { joined = false; return; }
    const x = (n * wide).toFixed(2);
    found += joined ? `L${x} ${high(value)}` : `M${x} ${high(value)}h.01`;
    joined = true;
  });
  return found;
}
function area(values, top) {
  let found = "", first = null;
  const wide = 100 / (values.length - 1);
  values.forEach((value, n) => {
    if (value !== null) {
      found += `${first === null ? `M${n * wide} 30L` : "L"}${n * wide} ${30 - (28 * value) / top}`;
      first = first ?? n;
    }
    if (first !== null && (value === null || n === values.length - 1)) {
      found += `L${(value === null ? n - 1 : n) * wide} 30Z`;
      first = null;
    }
  });
  return found;
}
function makeTile(tile) {
  const made = make("article", `tile tone-${tile.tone}`), plot = make("div", "plot"), ends = make("div", "ends");
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 100 30");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  for (const kind of ["area", "second", "main"]) {
    const line = document.createElementNS(SVG, "path");
    line.setAttribute("class", kind);
    svg.append(line);
  }
  plot.append(svg, make("span", "top"));
  ends.append(make("span", "", "15 min ago"), make("span", "", "now"));
  made.append(make("h3", "", tile.title), make("p", "now"), make("p", "more"), plot, ends);
  return made;
}
function updateTile(made, tile, trends) {
  const values = trends[tile.main], second = trends[tile.second] ?? [];
  const known = values.filter((value) => value !== null), last = values.slice(-6).findLast((value) => value !== null) ?? null;
  const top = Math.max(0, ...known, ...second.filter((value) => value !== null));
  const now = last === null ? "–" : tile.text(last), highest = top ? tile.text(top) : "";
  let more = "";
  if (tile.second && last !== null) more = `median; 95th percentile ${tile.text(second.findLast((value) => value !== null))}`;
  if (tile.second && last === null) more = "no answers in the last minute";
  if (tile.refused && trends.refused.some((value) => value)) more = `${tile.text(trends.refused.at(-1))} refused`;
  const [, nowShown, moreShown, plot] = made.children, [svg, topShown] = plot.children, [under, dashed, line] = svg.children;
  say(nowShown, now);
  say(moreShown, more);
  say(topShown, highest && `highest ${highest}`);
  svg.setAttribute("aria-label", `${tile.title}: ${now} now, at most ${highest || now} in 15 minutes`);
  under.setAttribute("d", top ? area(values, top) : "");
  line.setAttribute("d", top ? path(values, top) : "");
  dashed.setAttribute("d", top && tile.second ? path(second, top) : "");
}
function showTrends(trends) {
  const shown = TILES.filter((tile) => !tile.ifAny || trends[tile.main].some((value) => value));
  keep(byId("trends"), shown, (tile) => tile.title, makeTile, (made, tile) => updateTile(made, tile, trends));
}
