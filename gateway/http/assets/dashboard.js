// The dashboard: asks the gateway every two seconds while the page is visible, and draws what it answers.
import { $, ago, bar, bytes, count, element, focusOn, goTo, ms, rate, replace, say, share, sum, table } from "./dom.js";
import { Charts, railName } from "./charts.js";
import { findings, isSilent, praise } from "./health.js";
import { History } from "./history.js";
import { drawMap } from "./map.js";
import { timeline, waterfall } from "./timelines.js";

const MAX_ARROWS = 64; // of the map
const MANY = 8; // instances of a role, beyond which their cards are small
const history = new History(), charts = new Charts($("charts"));
let timer, earlier, opener, cluster, historyAt = 0;
const railsAt = []; // failures by process at the looks of the last minute
const flowsAt = []; // when, and tokens by pair of processes, at the latest looks
const PERIOD_MS = 2000, FLOW_LOOKS = 10, RAIL_LOOKS = 30;

// ---- the gateway's answers

async function ask(path) {
  const key = sessionStorage.getItem("key");
  const reply = await fetch(path, { headers: key ? { Authorization: `Bearer ${key}` } : {}, cache: "no-store" });
  if (reply.status === 401) {
    if ($("enter").hidden) { $("enter").hidden = false; $("ask").showModal(); } // once; then it is the button's
    throw new Error("an API key is needed");
  }
  $("enter").hidden = true;
  const body = await reply.json();
  if (!reply.ok) throw Object.assign(new Error(body.error.message), { code: body.error.code });
  return body;
}

async function askHistory() { // every five seconds; points come every ten
  if (performance.now() - historyAt < 5000) return false;
  historyAt = performance.now();
  if (!history.take(await ask(`v1/history?after=${history.number}`))) history.take(await ask("v1/history?after=0"));
  return true;
}

async function refresh() {
  clearTimeout(timer);
  try {
    if (document.hidden) return;
    // One after the other, so that one connection suffices and one of several gateways answers.
    const seen = await ask("v1/cluster").catch(error => { if (error.code !== "no_worker") throw error; });
    const figures = await ask("v1/figures"), isNew = await askHistory();
    show(seen, figures);
    if (isNew) charts.draw(history, figures, seen ? seen.events : []);
  } catch (error) {
    if ($("enter").hidden) judge({ history, error: error.message });
    else say($("state"), error.message, "bad");
  }
  finally { timer = setTimeout(refresh, PERIOD_MS); }
}

// ---- what is shown

function show(seen, figures) {
  if (seen) cluster = { ...seen, lost: false };
  else if (cluster) cluster = { ...cluster, lost: true };
  const found = judge({ cluster: seen, figures, history });
  if (cluster) {
    const noted = new Set(found.map(f => f.instance));
    showModel();
    showInstances(noted);
    drawMap(cluster, rates(figures), failingRails(figures.rails), noted);
  }
  showFigures(figures);
}

function judge(known) {
  const found = findings(known), bad = found.filter(f => f.level === "bad").length;
  const worst = bad ? "bad" : found.length ? "warn" : "good";
  say($("state"), bad ? `${bad} ${bad === 1 ? "problem" : "problems"}` : found.length ? "works, with warnings" : "all is well", worst);
  $("health").className = worst;
  const lines = found.map((each, i) => {
    const line = element("li"), [id, name] = each.target, link = element("a", `Show ${name}`);
    line.append(element("b", each.level === "bad" ? "Problem: " : "Note: ", each.level), `${each.text} `, link);
    link.href = `#${id}`;
    link.dataset.key = `finding-${id}-${i}`;
    link.addEventListener("click", event => { event.preventDefault(); goTo(id); });
    return line;
  });
  replace("health", lines.length ? lines : [element("li", known.cluster && known.figures ? praise(known.cluster, known.figures) : "")]);
  return found;
}

function showModel() {
  $("model").textContent = cluster.fingerprint
    ? `${cluster.models.join(", ")} · context ${count(cluster.max_model_len)} · blocks of ${cluster.layout.block_size} tokens · `
      + `${cluster.layout.dtype} · ${count(cluster.requests)} requests here`
    : "no worker has joined yet";
}

function rates(figures) { // tokens per second by pair of processes, over twenty seconds
  flowsAt.push([figures.at_s, new Map(figures.flows.map(([from, to, tokens]) => [`${from} ${to}`, tokens]))]);
  if (flowsAt.length > FLOW_LOOKS) flowsAt.shift();
  const [at, before] = flowsAt[0], seconds = figures.at_s - at;
  if (seconds <= 0) return [];
  const flows = figures.flows.map(([from, to, tokens]) => [from, to, Math.max(0, tokens - (before.get(`${from} ${to}`) || 0)) / seconds]);
  return flows.filter(flow => flow[2] > 0).sort((a, b) => b[2] - a[2]).slice(0, MAX_ARROWS);
}

function failingRails(rails) { // processes with more failures than a minute ago
  const failures = new Map();
  for (const rail of rails) failures.set(rail.process, (failures.get(rail.process) || 0) + rail.failures);
  railsAt.push(failures);
  if (railsAt.length > RAIL_LOOKS) railsAt.shift();
  return new Set([...failures].filter(([name, number]) => number > (railsAt[0].get(name) ?? number)).map(([name]) => name));
}

function showInstances(noted) {
  for (const role of ["prefill", "decode", "store"]) {
    const members = cluster.instances.filter(i => i.role === role), section = $(`role-${role}`);
    section.hidden = !members.length;
    say(section.firstElementChild, `${role} (${members.length})`);
    const cards = section.lastElementChild;
    cards.classList.toggle("many", members.length > MANY);
    const old = new Map([...cards.children].map(each => [each.id, each]));
    members.forEach((instance, i) => {
      const id = `instance-${instance.instance_id}`, made = old.get(id) || newCard(id, instance);
      old.delete(id);
      fill(made, instance, noted.has(instance.instance_id));
      if (cards.children[i] !== made) cards.insertBefore(made, cards.children[i] || null);
    });
    for (const gone of old.values()) gone.remove();
  }
}

function newCard(id, instance) { // it stays, so that it keeps the focus and what is open
  const made = element("article"), details = element("details"), summary = element("summary");
  made.id = id;
  made.tabIndex = -1;
  summary.dataset.key = id;
  summary.append(element("div", undefined, "name"), element("div"), element("div", undefined, "facts"));
  details.append(summary, element("dl"));
  if (instance.role !== "store") details.append(button("Its latest steps", `steps-${id}`, () => showSteps(instance.instance_id)));
  made.append(details);
  return made;
}

function fill(made, instance, noted) {
  const { load } = instance, [summary, list] = made.firstElementChild.children, [name, level, facts] = summary.children, silent = isSilent(instance);
  const word = instance.draining ? "draining" : silent ? `silent ${ago(instance.last_heard_s)}` : "up", store = instance.role === "store";
  made.className = silent ? "bad" : noted ? "warn" : "";
  name.replaceChildren(instance.instance_id, element("span", word, silent ? "bad" : instance.draining ? "warn" : "good"));
  level.replaceChildren(store ? bar(load.capacity_bytes, load.capacity_bytes - load.free_bytes) : bar(instance.num_blocks, load.held_blocks, load.leased_blocks));
  say(facts, store ? `${bytes(load.capacity_bytes - load.free_bytes)} of ${bytes(load.capacity_bytes)}` : `${load.num_running} run · ${load.num_waiting} wait`);
  const rows = store ? [["blocks stored", count(instance.indexed_blocks)]]
    : [["blocks held / leased / all", `${count(load.held_blocks)} / ${count(load.leased_blocks)} / ${count(instance.num_blocks)}`],
       ["blocks findable as prefix", count(instance.indexed_blocks)],
       instance.role === "prefill" ? ["tokens queued", count(load.queued_tokens)] : ["tokens of context", count(load.context_tokens)]];
  list.replaceChildren(...[...rows, ["address", instance.rpc_address], ["epoch", String(instance.epoch)]].flatMap(([what, value]) => [element("dt", what), element("dd", value)]));
}

function button(text, key, act) {
  const made = element("button", text, "link");
  made.type = "button"; made.dataset.key = key;
  made.addEventListener("click", act);
  return made;
}

function tile(title, value, detail, className) {
  const made = element("article");
  made.append(element("span", title, "dim"), element("b", value, className), element("span", detail, "dim"));
  return made;
}

function showFigures(now) {
  const before = earlier, seconds = before ? now.at_s - before.at_s : 0;
  const perSecond = name => seconds > 0 ? Math.max(0, now.totals[name] - before.totals[name]) / seconds : 0;
  const latency = (title, found, objective) => tile(title, found.count ? ms(found.p95) : "–",
    `p50 ${ms(found.p50)} · p99 ${ms(found.p99)} · objective ${ms(objective)}`,
    found.count && objective && found.p95 > objective ? "bad" : undefined);
  const rejected = sum(Object.values(now.rejections)), failed = sum(Object.values(now.failures));
  $("tiles").replaceChildren(
    latency("TTFT, p95", now.ttft_s, now.slo.ttft_s), latency("Between tokens, p95", now.tbt_s, now.slo.tbt_s),
    tile("Tokens per second", count(perSecond("output_tokens")), `${rate(perSecond("finished"))} requests per second`),
    tile("Prompt tokens from a cache", share(now.totals.cached_tokens / now.totals.prompt_tokens), `of ${count(now.totals.prompt_tokens)}`),
    tile("Requests", count(sum(Object.values(now.phases))), Object.entries(now.phases).map(([name, number]) => `${name} ${number}`).join(" · ")),
    tile("Not served", count(rejected + failed), `rejected ${count(rejected)}, failed ${count(failed)}`, rejected + failed ? "bad" : undefined));
  const old = new Map((before ? before.rails : []).map(rail => [rail.process + rail.transport + rail.rail, rail]));
  const speed = rail => {
    const was = old.get(rail.process + rail.transport + rail.rail);
    return was && seconds > 0 ? `${bytes(Math.max(0, rail.read_bytes + rail.written_bytes - was.read_bytes - was.written_bytes) / seconds)}/s` : "–";
  };
  const tables = [], rails = now.rails.filter(r => r.read_bytes + r.written_bytes + r.failures);
  if (rails.length) tables.push(table("Transfers by rail", ["from", "rail", "read", "written", "now", "failed", "sent again"],
    rails.map(r => [r.process, railName(`${r.transport} ${r.rail}`), bytes(r.read_bytes), bytes(r.written_bytes), speed(r), r.failures, r.retries])));
  if (now.prefixes?.length) tables.push(table("Hot prefixes", now.prefixes[0].text == null ? ["prefix", "tokens", "uses", "held by"] : ["text", "tokens", "uses", "held by"],
    now.prefixes.map(p => [p.text == null ? p.key.slice(0, 12) : p.text, p.tokens, p.heat, p.holders.join(", ")])));
  const refusals = [...Object.entries(now.rejections).map(([why, n]) => ["rejected", why, n]), ...Object.entries(now.failures).map(([why, n]) => ["failed", why, n])];
  if (refusals.length) tables.push(table("Rejected and failed", ["what", "reason", "requests"], refusals));
  $("rails").replaceChildren(...tables);
  replace("requests", now.latest && now.latest.length ? [latest(now.latest)] : []);
  earlier = now;
}

function latest(requests) {
  const rows = requests.map(r => {
    const link = button(r.request_id, r.request_id, () => explain(r.request_id));
    link.setAttribute("aria-label", `Explain ${r.request_id}`);
    return [link, r.outcome, r.prompt_tokens, r.cached_tokens, r.output_tokens, ms(r.ttft_s), ms(r.e2e_s)];
  });
  return table("Latest requests", ["request", "ended", "prompt", "cached", "generated", "TTFT", "in all"], rows);
}

// ---- one request

function explained(body) {
  const parts = [];
  for (const d of body.decisions) {
    parts.push(element("p", ending(d)), ...waterfall(d, body.timings[d.request_id.split("~")[0]]));
    const prefill = (d.prefill_candidates || []).map(c => [(c.instance_id === d.prefill ? "→ " : "") + c.instance_id, c.reuse_blocks, ms(c.queue_s), ms(c.load_s), ms(c.prefill_s), ms(c.ttft_s)]);
    parts.push(table(`Prefill candidates of ${d.request_id}`, ["instance", "blocks re-used", "queue", "load", "prefill", "TTFT"], prefill));
    const decode = (d.decode_candidates || []).map(c => [(c.instance_id === d.decode ? "→ " : "") + c.instance_id, c.num_seqs, c.free_blocks, ms(c.tbt_s), ms(c.landing_tbt_s)]);
    parts.push(table("Decode candidates", ["instance", "sequences", "free blocks", "TBT now", "TBT when it lands"], decode));
    const all = element("details"), raw = element("pre", JSON.stringify(d, null, 1));
    raw.tabIndex = 0; raw.setAttribute("role", "region"); raw.setAttribute("aria-label", "Everything that was weighed");
    all.append(element("summary", "Everything that was weighed"), raw);
    parts.push(all);
  }
  return parts;
}

function ending(d) {
  const limits = `predicted TTFT ${ms(d.predicted_ttft_s)} of ${ms(d.ttft_slo_s)}, TBT ${ms(d.predicted_tbt_s)} of ${ms(d.tbt_slo_s)}`;
  if (d.rejection) return `${limits}; rejected: ${d.rejection.reason}, again after ${ms(d.rejection.retry_after_s)}`;
  if (!d.outcome) return `${limits}; in flight, no token yet`;
  const o = d.outcome, after = o.phase === "first_token" ? "in flight" : `${o.phase} after ${ms(o.elapsed_s)} with ${o.output_tokens} tokens`;
  return `${limits}; ${after}, TTFT ${ms(o.ttft_s)}`;
}

async function inspect(title, path, draw) { // in the dialog, which is opened unless it is open
  if (!$("explanation").open) {
    opener = document.activeElement.dataset.key;
    say($("explained-title"), title);
    $("explained").replaceChildren(element("p", "asking …", "dim"));
    $("explanation").showModal();
  }
  try { replace("explained", draw(await ask(path))); }
  catch (error) { replace("explained", [element("p", error.message, "bad")]); }
}

const explain = id => inspect(`Request ${id}`, `v1/requests/${encodeURIComponent(id)}/explain`, explained);

function showSteps(id) { // as they are now; they do not move while one looks at them
  const again = button("Look again", "steps-again", () => showSteps(id));
  inspect(`Steps of ${id}`, `v1/instances/${encodeURIComponent(id)}/steps`, body => [...timeline(body.steps, $("explained").clientWidth), again]);
}

$("explain").addEventListener("submit", event => {
  event.preventDefault();
  if ($("request").value.trim()) explain($("request").value.trim());
});
$("explanation").addEventListener("close", () => focusOn(opener)); // it may have been drawn anew
$("enter").addEventListener("click", () => $("ask").showModal());
$("ask").addEventListener("close", () => {
  if ($("key").value) sessionStorage.setItem("key", $("key").value);
  refresh();
});
refresh();
if (location.hash) explain(decodeURIComponent(location.hash.slice(1))); // a link from the chat page
