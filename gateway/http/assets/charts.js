// Charts of the last hour, drawn by uPlot from a History.
import { bytes, element, median, ms, rate, share } from "./dom.js";

const HOUR_S = 3600, LEAST_S = 600; // a young gateway's axis is ten minutes long
const MAX_LINES = 8, OBJECTIVE = "objective";
// A request's phases in the order of time: name and colour.
export const PHASES = {
  retry: ["lost attempts", 6], gateway: ["gateway, placement", 7], queue: ["prefill queue", 1], load: ["prefix load", 3], prefill: ["prefill", 0],
  transfer: ["handoff", 5], decode_queue: ["decode queue", 4], decode: ["decode", 2],
};

// A chart: id, title, format of values, lines of a history; `stacked` areas or lines.
const CHARTS = [
  { id: "chart-ttft", title: "Time to first token", format: ms, lines: (h, now) => latency(h, "ttft", now.slo.ttft_s) },
  { id: "chart-tbt", title: "Time between tokens", format: ms, lines: (h, now) => latency(h, "tbt", now.slo.tbt_s) },
  { id: "chart-time", title: "Where a request's time goes (mean)", format: ms, stacked: true,
    lines: h => Object.entries(PHASES).map(([phase, [name, colour]]) => line(name, h.ratio(`time/${phase}`, "finished"), colour)).filter(any) },
  { id: "chart-tokens", title: "Tokens per second", format: rate, lines: h => [line("generated", h.get("output_tokens"), 0), line("prompts", h.get("prompt_tokens"), 1)] },
  { id: "chart-cache", title: "Prompt tokens from a cache", format: share, stacked: true, top: 1,
    lines: h => [line("worker's own", h.ratio("device_tokens", "prompt_tokens"), 0), line("store, same host", h.ratio("host_store_tokens", "prompt_tokens"), 2), line("store, other host", h.ratio("remote_store_tokens", "prompt_tokens"), 1)] },
  { id: "chart-phases", title: "Requests by phase", format: rate, stacked: true, lines: h => h.names("phase").map((phase, i) => line(phase, h.get(`phase/${phase}`), i)) },
  { id: "chart-waiting", title: "Queue per worker", format: rate, lines: h => perInstance(h, h.names("waiting"), id => h.get(`waiting/${id}`)) },
  { id: "chart-kv", title: "KV memory in use per instance", format: share, top: 1, lines: h => perInstance(h, h.names("kv"), id => h.get(`kv/${id}`)) },
  { id: "chart-step", title: "Decode step per worker", format: ms, lines: h => perInstance(h, h.names("steps"), id => h.ratio(`step_s/${id}`, `steps/${id}`)) },
  { id: "chart-rails", title: "KV moved per second, by rail", format: n => n == null ? "–" : `${bytes(n)}/s`, stacked: true, lines: h => h.names("rail").map((name, i) => line(railName(name), h.get(`rail/${name}`), i)) },
  { id: "chart-lost", title: "Requests not served, per minute", format: rate, stacked: true,
    lines: h => [line("rejected", perMinute(h.get("rejected")), 1), line("failed", perMinute(h.get("failed")), "bad")] },
];

const any = made => made.values.some(v => v);
const line = (label, values, colour, dash) => ({ label, values, colour: typeof colour === "number" ? `--s${colour % 8}` : `--${colour}`, dash });
const perMinute = values => values.map(v => v == null ? null : 60 * v);
export const railName = name => { const [transport, rail] = name.split(" "); return rail && rail !== transport ? name : transport; };

function latency(history, name, objective) {
  const lines = ["p50", "p95", "p99"].map((p, i) => line(p, history.get(`${name}/${p}`), [2, 0, 3][i]));
  return objective ? [...lines, line(OBJECTIVE, history.at.map(() => objective), "bad", [4, 4])] : lines;
}

// A line for each instance, or, of many, for those with the highest values in the last ten minutes and the median.
function perInstance(history, ids, of) {
  const all = ids.map(id => ({ id, values: of(id) }));
  if (all.length <= MAX_LINES) return all.map((each, i) => line(each.id, each.values, i));
  const height = each => Math.max(0, ...each.values.slice(-60).map(v => v || 0));
  const highest = [...all].sort((a, b) => height(b) - height(a)).slice(0, MAX_LINES - 2);
  const typical = history.at.map((_, i) => median(all.map(each => each.values[i]).filter(v => v != null)));
  return [...highest.map((each, i) => line(each.id, each.values, i)), line(`median of ${all.length}`, typical, 7, [2, 3])];
}

const colourOf = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

class Chart {
  constructor(spec) {
    this.spec = spec;
    this.root = element("figure");
    this.root.id = spec.id;
    this.root.tabIndex = -1; // findings lead here
    this.plotted = element("div", undefined, "plot");
    this.plotted.setAttribute("role", "img");
    this.legend = element("div", undefined, "legend");
    this.root.append(element("figcaption", spec.title), this.plotted, this.legend);
  }

  draw(history, figures, events) {
    const lines = history.at.length ? this.spec.lines(history, figures) : [];
    this.lines = lines;
    this.events = events;
    if (!lines.some(each => each.label !== OBJECTIVE && each.values.some(v => v != null))) {
      this.clear();
      return;
    }
    const drawn = this.spec.stacked ? stacked(lines) : lines.map(each => each.values);
    const data = [history.at, ...drawn], names = lines.map(each => each.label + each.colour).join();
    if (this.plot && this.names === names) this.plot.setData(data);
    else this.build(data, names);
    this.describe(undefined);
  }

  clear() {
    this.plot?.destroy();
    this.plot = undefined;
    this.plotted.replaceChildren();
    this.legend.replaceChildren();
    this.plotted.setAttribute("aria-label", `${this.spec.title}: no data`);
  }

  build(data, names) {
    this.clear();
    this.names = names;
    const { spec } = this, axis = { stroke: colourOf("--dim"), grid: { stroke: colourOf("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const series = this.lines.map(each => {
      const colour = colourOf(each.colour);
      return { stroke: colour, width: spec.stacked ? 0 : 1.5, fill: spec.stacked ? colour : undefined, dash: each.dash, points: { show: u => !spec.stacked && u.data[0].length < 3, size: 4 } };
    });
    const options = {
      width: this.plotted.clientWidth, height: this.plotted.clientHeight, legend: { show: false }, padding: [6, 18, 0, 0],
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 5 }, sync: { key: "history" } },
      scales: { x: { range: (u, least, most) => [Math.max(most - HOUR_S, Math.min(least, most - LEAST_S)), most] }, y: { range: (u, least, most) => [0, spec.top || 1.05 * this.top(most) || 1] } },
      axes: [{ ...axis, size: 24, space: 60, values: (u, splits) => splits.map(at => new Date(1e3 * at).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" })) },
        { ...axis, size: 58, space: 30, values: (u, splits) => splits.map(v => spec.format(v)) }],
      series: [{}, ...series],
      hooks: { setCursor: [u => this.describe(u.cursor.idx)], draw: [u => this.mark(u)] },
    };
    this.plot = new uPlot(options, data, this.plotted);
  }

  top(most) { // an objective far above the values would flatten them
    const highest = Math.max(0, ...this.lines.filter(each => each.label !== OBJECTIVE).flatMap(each => each.values.map(v => v || 0)));
    return this.spec.stacked || most <= 3 * highest ? most : highest;
  }

  mark(plot) { // when an instance left or restarted
    for (const event of this.events) {
      if (event.at < plot.scales.x.min || event.at > plot.scales.x.max) continue;
      const x = plot.valToPos(event.at, "x", true), { top, height } = plot.bbox;
      plot.ctx.fillStyle = colourOf(event.what === "left" ? "--bad" : "--dim");
      for (let y = top; y < top + height; y += 6) plot.ctx.fillRect(x, y, 1.5, 3);
    }
  }

  describe(index) { // the values under the pointer, or else the latest
    const at = index ?? this.plot.data[0].length - 1, values = this.lines.map(each => this.spec.format(each.values[at]));
    this.legend.replaceChildren(...this.lines.map((each, i) => {
      const made = element("span"), colour = element("i");
      colour.style.background = `var(${each.colour})`;
      made.append(colour, `${each.label} `, element("b", values[i]));
      return made;
    }));
    if (index == null) this.plotted.setAttribute("aria-label", `${this.spec.title}, now: ${this.lines.map((each, i) => `${each.label} ${values[i]}`).join(", ")}`);
  }

  resize() {
    if (this.plot && this.plotted.clientWidth !== this.plot.width) this.plot.setSize({ width: this.plotted.clientWidth, height: this.plotted.clientHeight });
  }
}

function stacked(lines) { // the highest sum is drawn first, so that each area hides what is not its own
  const sums = lines[0].values.map(() => 0);
  const tops = [...lines].reverse().map(each => each.values.map((v, i) => sums[i] += v || 0));
  return tops.reverse();
}

export class Charts {
  constructor(place) {
    this.charts = CHARTS.map(spec => new Chart(spec));
    place.append(...this.charts.map(chart => chart.root));
    new ResizeObserver(() => this.charts.forEach(chart => chart.resize())).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.charts.forEach(chart => chart.names = undefined); this.again?.(); });
  }

  draw(history, figures, events) {
    this.again = () => this.charts.forEach(chart => chart.draw(history, figures, events));
    this.again();
  }
}
