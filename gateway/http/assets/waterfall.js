// A request's times as bars below one another, beside those that its placement predicted.
import { element, ms } from "./dom.js";
import { PHASES } from "./charts.js";

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
