// SPDX-License-Identifier: Apache-2.0

// Engines.
const TONES = { queue: "tone-prefill", batch: "tone-decode" };
function setBar(bars, name, part, value, text) {
  let bar = bars.querySelector(`[data-bar="${name}"]`);
  if (!bar) {
    bar = make("div", "bar");
    bar.dataset.bar = name;
    bar.setAttribute("role", "meter");
    bar.setAttribute("aria-label", name);
    bar.setAttribute("aria-valuemin", "0");
    bar.setAttribute("aria-valuemax", "100");
    bar.append(make("i"));
    bars.append(make("span", "", name), bar, make("span", "value"));
  }
  const percent = part === null ? 0 : Math.round(100 * Math.min(1, Math.max(0, part)));
  bar.setAttribute("aria-valuenow", percent);
  bar.setAttribute("aria-valuetext", text);
  bar.firstChild.style.width = `${percent}%`;
  const level = name === "cache" && part >= 0.85 ? (part >= 0.95 ? " full" : " high") : "";
  const kind = `bar ${TONES[name] ?? ""}${level}`;
  if (bar.className !== kind) bar.className = kind;
  say(bar.nextSibling, value);
}
function makeEngine() {
  const made = make("article", "engine"), head = make("h4");
  head.append(make("span", "name"), make("span", "state"));
  made.append(head, make("p", "about"), make("p", "why"), make("div", "bars"), make("p", "facts"));
  return made;
}
const sideOf = (engine) => (engine.role === "cpu_prefill" ? "prefill" : engine.role === "prefill" || engine.role === "both" ? engine.role : "decode");
function factsOf(engine, side) {
  const told = [`${number(engine.requests)} open`];
  if (engine.role === "cpu_prefill") told.unshift("CPU");
  if (engine.role === "unknown") told.unshift("side not known yet");
  if (engine.group !== "default") told.push(`group ${engine.group}`);
  if (engine.sent_bytes_s > 0) told.push(`sends ${bytes(engine.sent_bytes_s)}/s`);
  if (engine.received_bytes_s > 0) told.push(`gets ${bytes(engine.received_bytes_s)}/s`);
  if (side !== "decode" && engine.cached_blocks) told.push(`${number(engine.cached_blocks)} blocks cached`);
  if (engine.leased_pages) told.push(`${number(engine.leased_pages)} pages kept for decode`);
  if (engine.transports.length) told.push(`KV over ${engine.transports.join(", ")}`);
  if (engine.pool) told.push(engine.pool);
  if (engine.pool_problem) told.push("KV pool not known here");
  if (engine.weights) told.push(engine.weights);
  if (engine.away) told.push("not its home side");
  if (engine.pinned) told.push("pinned");
  return told.join(" · ");
}
function updateEngine(made, engine, side, most) {
  const [head, about, why, bars, facts] = made.children, [name, state] = head.children;
  const tone = side === "both" ? "tone-kv" : `tone-${side}`, kind = `engine ${tone} ${engine.state}`;
  if (made.className !== kind) made.className = kind;
  say(name, short(engine.url));
  say(state, engine.state);
  state.className = `state ${engine.state}`;
  say(about, engine.about);
  about.hidden = !engine.about;
  say(why, engine.state === "up" ? "" : engine.why);
  why.hidden = !why.textContent;
  why.title = engine.why;
  if (side !== "decode") setBar(bars, "queue", engine.queued_s / most.queue, seconds(engine.queued_s), `${seconds(engine.queued_s)} of prefill wait`);
  if (side !== "prefill") setBar(bars, "batch", engine.batch / most.batch, number(engine.batch), `${engine.batch} requests decode, ${engine.context} tokens of context`);
  const used = engine.cache_used;
  setBar(bars, "cache", used, used === null ? "–" : `${Math.round(100 * used)} %`, used === null ? "not reported" : `${number(100 * used)} % of its KV cache is in use`);
  bars.hidden = engine.state === "down";
  say(facts, factsOf(engine, side));
  facts.title = engine.pool_problem || (engine.cached_blocks ? `cached blocks: known by ${engine.cache_known_by}` : "");
  state.title = engine.role_why;
  facts.hidden = engine.state === "down";
}
function showEngines(engines) {
  const most = {
    queue: Math.max(1, ...engines.map((one) => one.queued_s)),
    batch: Math.max(8, ...engines.map((one) => one.batch)),
  };
  const none = engines.some((one) => one.role === "both") ? "Only engines of both sides, below." : "No engine on this side.";
  for (const shown of document.querySelectorAll(".none")) say(shown, none);
  for (const side of ["prefill", "decode", "both"]) {
    const here = engines.filter((one) => sideOf(one) === side);
    keep(byId(side), here, (one) => one.url, makeEngine, (made, one) => updateEngine(made, one, side, most));
    const up = here.filter((one) => one.state !== "down").length;
    const title = { prefill: "Prefill", decode: "Decode", both: "Both sides" }[side];
    say(byId(`${side}-title`), here.length ? `${title}: ${up === here.length ? up : `${up} of ${here.length}`} up` : title);
  }
}

// KV on its way.
function codecsOf(counts) {
  const codecs = Object.entries(counts).sort((a, b) => b[1] - a[1]);
  const all = codecs.reduce((sum, one) => sum + one[1], 0);
  return codecs.map(([name, count]) => (codecs.length > 1 ? `${name} ${share(count, all)}` : name)).join(", ") || "–";
}
const OUTCOMES = { handed_over: "handed over", recomputed: "recomputed", cached: "cached there", audited: "audited", unaudited: "not audited yet", aborted: "aborted" };
function showKv(told) {
  const rate = told.engines.reduce((sum, one) => sum + one.received_bytes_s, 0), recent = told.recent;
  const loaded = told.engines.reduce((sum, one) => sum + one.pool_bytes_s, 0);
  say(byId("kv-rate"), `${bytes(rate)}/s`);
  byId("kv-arrow").classList.toggle("moving", rate > 0);
  const ended = Object.entries(recent.outcomes).reduce((sum, [name, count]) => sum + (name === "aborted" ? 0 : count), 0);
  const facts = [
    ["codec", codecsOf(recent.codecs)],
    ["early", share(recent.early_chunks, recent.sent_chunks), "chunks sent while their prompt was still computed"],
    ["recomputed", share(recent.outcomes.recomputed ?? 0, ended), "requests whose KV did not arrive"],
  ];
  for (const [name, text] of Object.entries(OUTCOMES))
    if (name !== "recomputed" && recent.outcomes[name]) facts.push([text, number(recent.outcomes[name])]);
  if (loaded) facts.push(["from pools", `${bytes(loaded)}/s`]);
  keep(byId("kv-facts"), facts, (fact) => fact[0],
    (fact) => {
      const made = make("div");
      made.style.display = "contents";
      made.append(make("dt", "", fact[0]), make("dd"));
      return made;
    },
    (made, [, text, title]) => { say(made.lastChild, text); made.title = title ?? ""; });
}

// Tables.
function cells(row, texts, numbers) {
  while (row.cells.length < texts.length) row.insertCell();
  texts.forEach((text, n) => {
    say(row.cells[n], text);
    if (numbers.includes(n)) row.cells[n].className = "number";
  });
}
function showTables(told) {
  const pools = new Map();
  for (const one of told.engines.filter((engine) => engine.pool)) {
    const pool = pools.get(one.pool) ?? { name: one.pool, chunks: 0, rate: 0, engines: [] };
    pool.chunks = Math.max(pool.chunks, one.pool_chunks);
    pool.rate += one.pool_bytes_s;
    pool.engines.push(short(one.url));
    pools.set(one.pool, pool);
  }
  byId("pairs").hidden = !told.pairs.length;
  keep(byId("pair-rows"), told.pairs, (pair) => `${pair.prefill} ${pair.decode}`, () => make("tr"),
    (row, pair) => cells(row, [short(pair.prefill), short(pair.decode), `${bytes(pair.bytes_s)}/s`, codecsOf(pair.codecs),
      share(pair.early_chunks, pair.chunks), share(pair.failed, pair.transfers), number(pair.transfers)], [2, 4, 5, 6]));
  byId("pools").hidden = !pools.size;
  keep(byId("pool-rows"), pools.values(), (pool) => pool.name, () => make("tr"),
    (row, pool) => cells(row, [pool.name, number(pool.chunks), `${bytes(pool.rate)}/s`, pool.engines.join(", ")], [1, 2]));
  byId("moves").hidden = !told.decisions.length;
  keep(byId("decisions"), told.decisions.slice().reverse(), (one) => `${one.key} ${one.engine}`, () => make("tr"),
    (row, one) => cells(row, [ago(one.at_s), short(one.engine), `${one.before} → ${one.after}`, one.outcome, one.why], [0]));
}

// The stream of events.
function show(told) {
  const count = told.troubles.length, worst = told.troubles[0]?.level ?? "good";
  const summary = count === 0 ? "nothing is wrong" : count === 1 ? "1 thing is wrong" : `${count} things are wrong`;
  document.body.className = "";
  document.title = count ? `(${count}) pd-router` : "pd-router";
  say(byId("summary"), summary);
  byId("summary").className = worst;
  const waiting = Object.entries(told.waiting).filter(([, n]) => n).map(([name, n]) => `${n} ${name}`).join(", ");
  say(byId("facts"), `policy ${told.policy} · waiting at the router: ${waiting || "none"}`);
  showTroubles(told.troubles);
  if (told.trends) showTrends(told.trends);
  showEngines(told.engines);
  showKv(told);
  showTables(told);
}
function lost(text) {
  document.body.className = "stale";
  document.title = "(?) pd-router";
  byId("summary").className = "critical";
  say(byId("summary"), text);
}
const given = new URLSearchParams(location.hash.slice(1)).get("token");
if (given) {
  sessionStorage.setItem("token", given);
  history.replaceState(null, "", location.pathname);  // it is in no link that is copied from here
}
const token = sessionStorage.getItem("token");
async function watch() {  // EventSource can send no header
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const answer = await fetch("live", { headers, cache: "no-store" });
  if (!answer.ok) throw new Error(await answer.text());
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const event of events) show(JSON.parse(event.slice("data: ".length)));
  }
}
async function keepWatching() {
  try { await watch(); lost("the router has ended"); }
  catch (error) { lost(`the router does not answer (${error.message})`); }
  setTimeout(keepWatching, 3000);
}
keepWatching();
