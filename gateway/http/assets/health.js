// Says whether all is well, and if not what is slow or fails and why. Pure: figures in, sentences out.
import { ago, count, median, ms, share, sum } from "./dom.js";

export const SILENT_S = 3; // three heartbeats
const RESTARTED_S = 300;
const MIN_SAMPLES = 5; // of a percentile that counts
const LONG_QUEUE = 8;
const PHASES = {
  retry: "attempts that were lost", gateway: "placement", queue: "the prefill queue", load: "loading cached prefixes",
  prefill: "computing prompts",
};
const REMEDY = {
  queue: "add prefill workers, or switch a worker's role", prefill: "prompts are long: more of them must come from a cache",
  load: "stores or links are slow", gateway: "the gateway or the conductor is busy", retry: "workers are lost",
};

// `cluster`, `figures`: bodies of /v1/cluster and /v1/figures, undefined without an answer. `history`: a History.
// Returns [{level: "bad" | "warn", text, target: [id of an element, its name], instance}], the worst first;
// `instance`: the one that it is about, if any.
export function findings({ cluster, figures, history, error }) {
  const found = [], say = (level, text, id, name, instance) => found.push({ level, text, target: [id, name], instance });
  if (!cluster) {
    say("bad", error ? `No answer: ${error}.` : "The conductor does not answer: new requests wait, and then fail.", "map", "map");
  } else {
    members(cluster, say);
    queues(cluster, history, say);
  }
  if (figures) latencies(figures, cluster, history, say);
  losses(figures, history, say);
  return [...found.filter(f => f.level === "bad"), ...found.filter(f => f.level === "warn")];
}

function members(cluster, say) {
  const present = new Set(cluster.instances.map(i => i.instance_id));
  for (const role of ["prefill", "decode"]) {
    if (!cluster.instances.some(i => i.role === role)) say("bad", `There is no ${role} worker: requests wait for one.`, "map", "map");
  }
  for (const event of cluster.events) {
    const { instance_id: id, role } = event, passed = cluster.at - event.at, when = `${ago(passed)} ago`;
    const effect = role === "store" ? "its blocks are computed again" : "its requests continue on others";
    if (event.what === "left" && !present.has(id)) say("bad", `${id} (${role}) left the cluster ${when} without a drain and is not back: ${effect}.`, "map", "map");
    if (event.what === "restarted" && present.has(id) && passed < RESTARTED_S) say("warn", `${id} restarted ${when}.`, `instance-${id}`, id, id);
  }
  for (const each of cluster.instances) {
    const id = each.instance_id;
    if (isSilent(each)) say("bad", `${id} (${each.role}) has been silent for ${ago(each.last_heard_s)}: it hangs, or its network is cut.`, `instance-${id}`, id, id);
    else if (each.draining) say("warn", `${id} drains: it takes no new work.`, `instance-${id}`, id, id);
  }
}

export const isSilent = instance => instance.last_heard_s > SILENT_S && !instance.draining;

function queues(cluster, history, say) {
  for (const role of ["prefill", "decode"]) {
    const workers = cluster.instances.filter(i => i.role === role), waiting = sum(workers.map(w => w.load.num_waiting));
    const [longest, ...others] = [...workers].sort((a, b) => b.load.num_waiting - a.load.num_waiting);
    if (waiting < LONG_QUEUE || waiting < 2 * workers.length) continue;
    const earlier = points => sum(workers.map(w => history.get(`waiting/${w.instance_id}`).at(-points)));
    const lasting = Math.min(waiting, earlier(1)), before = earlier(6); // one look alone is no trend
    const typical = median(others.map(w => w.load.num_waiting));
    const uneven = others.length && longest.load.num_waiting >= 3 * (typical + 1);
    if (history.at.length >= 6 && lasting >= Math.max(LONG_QUEUE, 2 * before))
      say("bad", `The queue of ${role} workers grows: ${count(waiting)} requests wait, a minute ago ${count(before)}.`, "chart-waiting", "queues");
    else if (!uneven) say("warn", `${count(waiting)} requests wait at ${role} workers.`, "chart-waiting", "queues");
    if (uneven)
      say("warn", `${count(longest.load.num_waiting)} requests wait at ${longest.instance_id}, at a typical other ${role} worker ${count(typical)}.`, "chart-waiting", "queues", longest.instance_id);
  }
  for (const worker of cluster.instances.filter(i => i.role === "decode" && i.num_blocks)) {
    const used = (worker.load.held_blocks + worker.load.leased_blocks) / worker.num_blocks;
    if (used > .95 && worker.load.num_waiting) say("warn", `${worker.instance_id}'s KV memory is ${share(used)} full, and requests wait for it.`, "chart-kv", "KV memory", worker.instance_id);
  }
}

// Mean seconds of a worker's decode steps in the last minute; null without steps.
export function stepSeconds(history, id) {
  const steps = history.growth(`steps/${id}`);
  return steps > 0 ? history.growth(`step_s/${id}`) / steps : null;
}

function latencies(figures, cluster, history, say) {
  const { ttft_s: ttft, tbt_s: tbt, slo } = figures;
  if (ttft.count >= MIN_SAMPLES && slo.ttft_s && ttft.p95 > slo.ttft_s) {
    const parts = Object.keys(PHASES).map(phase => [history.growth(`time/${phase}`), phase]), whole = sum(parts.map(p => p[0]));
    const [most, phase] = parts.reduce((a, b) => b[0] > a[0] ? b : a);
    const why = whole > 0 ? `: ${share(most / whole)} of the wait is ${PHASES[phase]} (${REMEDY[phase]})` : "";
    say("bad", `First tokens are late: p95 ${ms(ttft.p95)}, objective ${ms(slo.ttft_s)}${why}.`, whole > 0 ? "chart-time" : "chart-ttft", whole > 0 ? "where the time goes" : "TTFT");
  }
  const workers = cluster ? cluster.instances.filter(i => i.role === "decode") : [];
  const steps = workers.map(w => [stepSeconds(history, w.instance_id), w.instance_id]).filter(s => s[0] != null).sort((a, b) => b[0] - a[0]);
  if (tbt.count >= MIN_SAMPLES && slo.tbt_s && tbt.p95 > slo.tbt_s) {
    const why = steps.length ? `: the slowest steps are ${steps[0][1]}'s, ${ms(steps[0][0])} each` : "";
    say("bad", `Gaps between tokens are long: p95 ${ms(tbt.p95)}, objective ${ms(slo.tbt_s)}${why}.`, "chart-step", "decode steps");
  }
  const typical = median(steps.slice(1).map(s => s[0]));
  if (typical && steps[0][0] > 2.5 * typical)
    say("warn", `${steps[0][1]} is slow: a step takes ${ms(steps[0][0])}, at a typical other decode worker ${ms(typical)}.`, "chart-step", "decode steps", steps[0][1]);
}

function losses(figures, history, say) {
  const most = counts => Object.entries(counts || {}).sort((a, b) => b[1] - a[1])[0]?.[0];
  const lost = (name, verb, counts, level) => {
    const number = Math.round(history.growth(name)), reason = most(counts);
    if (number > 0) say(level, `${count(number)} ${number === 1 ? "request was" : "requests were"} ${verb} in the last minute${reason ? `, mostly: ${reason}` : ""}.`, "chart-lost", "not served");
  };
  lost("rejected", "rejected", figures?.rejections, "bad");
  lost("failed", "not finished", figures?.failures, "bad");
  const failures = Math.round(history.growth("rail_failures"));
  if (failures > 0) say("warn", `${count(failures)} transfers failed in the last minute.`, "rails", "rails");
}

// One line for a cluster without findings.
export function praise(cluster, figures) {
  const number = role => cluster.instances.filter(i => i.role === role).length, parts = [];
  for (const [role, name] of [["prefill", "prefill"], ["decode", "decode"], ["store", "store"]]) if (number(role)) parts.push(`${count(number(role))} ${name}`);
  const { ttft_s: ttft, slo } = figures;
  const times = ttft.count ? ` First tokens after ${ms(ttft.p95)} (p95)${slo.ttft_s ? `, objective ${ms(slo.ttft_s)}` : ""}.` : " No requests in the last minute.";
  return `All is well: ${parts.join(", ")} answer.${times}`;
}
