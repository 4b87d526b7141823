// Drawings of times: a request's phases beside those that its placement predicted, and the latest steps of a worker.
import { count, element, median, ms, share, sum, svg, table } from "./dom.js";
import { PHASES } from "./charts.js";

// ---- a request: bars below one another

const MAX_GAPS = 40;

// Bars [phase, begin, seconds] of what happened: as this gateway measured it, or else as the conductor was told.
function actual(timing, outcome) {
  let parts;
  if (timing && timing.gateway_s != null) parts = Object.keys(PHASES).map(phase => [phase, timing[`${phase}_s`]]);
  else if (outcome && outcome.queue_s != null) {
    const known = [["queue", outcome.queue_s], ["load", outcome.transfer_s], ["prefill", outcome.prefill_s]];
    const rest = Math.max(0, outcome.ttft_s - known.reduce((total, part) => total + part[1], 0));
    parts = [["gateway", rest], ...known];
    if (outcome.elapsed_s > outcome.ttft_s) parts.push(["decode", outcome.elapsed_s - outcome.ttft_s]);
  } else return [];
  let at = 0;
  return parts.map(([phase, seconds]) => { at += seconds; return [phase, at - seconds, seconds]; }).filter(bar => bar[2] > 0);
}

function predicted(decision) {
  const undivided = decision.is_undivided && decision.undivided_candidates?.find(c => c.instance_id === decision.decode);
  const chosen = undivided || decision.prefill_candidates?.find(c => c.instance_id === decision.prefill);
  if (!chosen) return [];
  let at = 0;
  return [["queue", chosen.queue_s], ["load", chosen.load_s], ["prefill", chosen.prefill_s]]
    .map(([phase, seconds]) => { at += seconds; return [phase, at - seconds, seconds]; });
}

// Returns the waterfall of one choice, or nothing where no times are known. `timing`: of the gateway.
export function waterfall(decision, timing) {
  const happened = actual(timing, decision.outcome), expected = predicted(decision);
  if (!happened.length) return [];
  const whole = Math.max(...happened.map(bar => bar[1] + bar[2]), timing?.e2e_s || 0), made = element("div", undefined, "waterfall");
  const start = happened.find(bar => bar[0] !== "retry" && bar[0] !== "gateway")?.[1] || 0; // predictions begin at the worker
  const rows = new Map(happened.map(([phase]) => [phase, []]));
  for (const [phase, begin, seconds] of expected) rows.get(phase)?.push(span(phase, start + begin, seconds, whole, "predicted"));
  for (const [phase, begin, seconds] of happened) rows.get(phase).push(span(phase, begin, seconds, whole, ""));
  for (const [phase, , seconds] of happened) {
    const track = element("div", undefined, "track"), guess = expected.find(bar => bar[0] === phase);
    track.append(...rows.get(phase));
    if (phase === "decode") track.append(...tokens(timing, whole, decision.tbt_slo_s));
    if (timing?.ttft_s != null || decision.outcome?.ttft_s != null) track.append(mark(timing?.ttft_s ?? decision.outcome.ttft_s, whole));
    track.setAttribute("aria-hidden", "true"); // the names and durations stand beside it
    const value = element("b", ms(seconds));
    if (guess) { value.title = `predicted ${ms(guess[2])}`; value.append(element("span", ` (${ms(guess[2])})`, "dim")); }
    made.append(element("span", PHASES[phase][0]), track, value);
  }
  return [element("h2", "Where its time went"), made, element("p", about(timing, decision), "dim")];
}

function span(phase, begin, seconds, whole, className) {
  const made = element("i", undefined, `span ${className}`);
  made.style.cssText = `left: ${100 * begin / whole}%; width: ${100 * Math.min(seconds, whole - begin) / whole}%; background: var(--s${PHASES[phase][1]})`;
  return made;
}

function mark(seconds, whole) {
  const made = element("i", undefined, "mark");
  made.style.left = `${100 * Math.min(1, seconds / whole)}%`;
  return made;
}

function gaps(timing) { // [begin, seconds] between pieces of output
  const at = timing?.arrivals_s || [];
  return at.slice(1).map((end, i) => [at[i], end - at[i]]);
}

function tokens(timing, whole, objective) { // a tick per piece; gaps over the objective in red
  const ticks = (timing?.arrivals_s || []).map(at => { const made = element("i", undefined, "tick"); made.style.left = `${100 * Math.min(1, at / whole)}%`; return made; });
  const late = gaps(timing).filter(gap => objective && gap[1] > objective).slice(0, MAX_GAPS).map(([begin, seconds]) => {
    const made = element("i", undefined, "gap");
    made.style.cssText = `left: ${100 * begin / whole}%; width: ${100 * seconds / whole}%`;
    return made;
  });
  return [...late, ...ticks];
}

function about(timing, decision) {
  const found = gaps(timing), longest = found.reduce((a, b) => b[1] > a[1] ? b : a, [0, 0]);
  const parts = ["The line marks the first token; pale bars and values in parentheses are what the placement predicted."];
  if (found.length) parts.push(`Ticks are the pieces of the answer (${found.length + 1}); the longest gap is ${ms(longest[1])}, after ${ms(longest[0])}.`);
  const late = found.filter(gap => decision.tbt_slo_s && gap[1] > decision.tbt_slo_s).length;
  if (late) parts.push(`Red: ${late === 1 ? "one gap is" : `${late} gaps are`} over the objective of ${ms(decision.tbt_slo_s)}.`);
  if (!timing) parts.push("Another gateway served this request, or it ended long ago: these are the conductor's figures, and the times between them are not known.");
  return parts.join(" ");
}

// ---- a worker's steps: lines of time, from left to right, with bars as wide as steps took and as high as they computed tokens

const LINES = 4, HEIGHT = 40, GAP = 8, LEFT = 62, LEAST_HEIGHT = 5;
const WINDOW_S = 60; // before the latest step; older ones are not drawn
const NUM_SLOWEST = 8;
const KINDS = { prompt: ["prompts", 0], decode: ["decode", 2], mixed: ["both", 4] }; // name and colour

const kind = step => step.prompt_tokens && step.decode_tokens ? "mixed" : step.prompt_tokens ? "prompt" : "decode";
const size = step => step.prompt_tokens + step.decode_tokens;

// Steps with their begin and end on an axis that ends with the latest step.
function onAxis(steps) {
  const last = Math.min(...steps.map(s => s.ago_s - s.seconds));
  return steps.map(s => ({ ...s, begin: last - s.ago_s, end: last - s.ago_s + s.seconds })).filter(s => s.begin >= -WINDOW_S);
}

// Pauses [begin, seconds] between steps; steps of a pipeline overlap.
function pauses(steps) {
  const found = [];
  let until = steps[0].end;
  for (const step of steps) {
    if (step.begin > until) found.push([until, step.begin - until]);
    until = Math.max(until, step.end);
  }
  return found;
}

function drawing(steps, width) {
  const start = steps[0].begin, perLine = -start / LINES, scale = (width - LEFT) / perLine, most = Math.max(...steps.map(size), 1);
  const made = svg("svg", { viewBox: `0 0 ${width} ${LINES * (HEIGHT + GAP)}`, height: LINES * (HEIGHT + GAP), role: "img" });
  for (let line = 0; line < LINES; line++) {
    const from = start + line * perLine, to = from + perLine, base = (line + 1) * (HEIGHT + GAP) - GAP;
    made.append(svg("text", { x: 0, y: base }, `−${ms(-from)}`), svg("line", { x1: LEFT, x2: width, y1: base + .5, y2: base + .5 }));
    const part = (step, begin, end, height, attributes) => { // what of it lies in this line
      const x = LEFT + scale * (Math.max(begin, from) - from), right = LEFT + scale * (Math.min(end, to) - from);
      const bar = svg("rect", { x, y: base - height, width: Math.max(.75, right - x - .5), height, ...attributes });
      bar.append(svg("title", {}, described(step)));
      return bar;
    };
    for (const step of steps.filter(s => s.begin < to && s.end > from)) {
      const height = Math.max(LEAST_HEIGHT, HEIGHT * Math.sqrt(size(step) / most));
      made.append(part(step, step.begin, step.end, height, { class: kind(step) }));
      const waited = step.begin + step.waited_s;
      if (step.waited_s && waited > from) made.append(part(step, step.begin, waited, height, { class: "waited" }));
    }
  }
  return made;
}

function described(step) {
  return `${ms(step.seconds)}: ${count(step.prompt_tokens)} prompt and ${count(step.decode_tokens)} decode tokens of ${count(step.num_sequences)} sequences`
    + ` with ${count(step.context_tokens)} tokens of context${step.waited_s ? `; waited ${ms(step.waited_s)} for a prefix` : ""}`;
}

function legend(steps) {
  const made = element("div", undefined, "legend");
  const add = (text, colour) => { const item = element("span"), mark = element("i"); mark.style.background = `var(--s${colour})`; item.append(mark, text); made.append(item); };
  for (const [name, [text, colour]] of Object.entries(KINDS)) if (steps.some(s => kind(s) === name)) add(text, colour);
  if (steps.some(s => s.waited_s)) add("waiting for a prefix", 3);
  return made;
}

function slowest(steps) {
  const typical = Object.fromEntries(Object.keys(KINDS).map(name => [name, median(steps.filter(s => kind(s) === name).map(s => s.seconds))]));
  const waits = steps.some(s => s.waited_s), rows = [...steps].sort((a, b) => b.seconds - a.seconds).slice(0, NUM_SLOWEST).map(s => [
    ms(s.seconds), `${(s.seconds / (typical[kind(s)] || s.seconds || 1)).toFixed(1)} ×`, KINDS[kind(s)][0], s.prompt_tokens, s.decode_tokens,
    s.num_sequences, s.context_tokens, ...(waits ? [ms(s.waited_s)] : []), ms(s.ago_s)]);
  return table("The slowest", ["took", "against the median", "computed", "prompt tokens", "decode tokens", "sequences", "context", ...(waits ? ["waited for a prefix"] : []), "ago"], rows);
}

// What is shown of a worker's steps in `width` pixels.
export function timeline(all, width) {
  if (!all.length) return [element("p", "The worker has computed nothing yet, or its engine does not report single steps.")];
  const steps = onAxis(all), idle = pauses(steps), whole = -steps[0].begin, idleS = sum(idle.map(pause => pause[1]));
  const longest = Math.max(0, ...idle.map(pause => pause[1])), ago = Math.min(...all.map(s => s.ago_s - s.seconds));
  const text = `${count(steps.length)} steps in ${ms(whole)}, the last one ended ${ms(Math.max(0, ago))} ago. The engine was busy for ${share(1 - idleS / whole)} of the time`
    + `${idle.length ? `; the longest pause took ${ms(longest)}` : ""}.`;
  const figure = element("div", undefined, "steps"), picture = drawing(steps, width);
  picture.setAttribute("aria-label", text);
  figure.append(picture, legend(steps));
  return [element("p", text), figure, element("p", "Width: time; height: tokens computed. Empty: no step. Times count back from the end of the last step. The median is of steps of the same kind.", "dim"), slowest(steps)];
}
