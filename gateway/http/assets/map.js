// The cluster as a picture: processes in rows by role, arrows as thick as the tokens that moved lately.
import { $, count, element, goTo, rate, sum, svg } from "./dom.js";
import { isSilent } from "./health.js";
import { compare } from "./history.js";

const ROW = 104, BOX = 28, GAP = 6, LEFT = 22, LABELLED = 78, MIN_BOX = 30;
const THICKEST = 7;

// Nodes of one role within [left, left + width), in as many lines as they need. Returns the y below them.
function place(nodes, left, width, top) {
  const least = Math.min(nodes.length <= 4 ? LABELLED : MIN_BOX, width), perLine = Math.max(1, Math.min(nodes.length, Math.floor((width + GAP) / (least + GAP))));
  const lines = Math.ceil(nodes.length / perLine), inLine = Math.ceil(nodes.length / lines), box = Math.min(170, (width - GAP * (inLine - 1)) / inLine);
  const gap = inLine > 1 ? Math.min(90, (width - inLine * box) / (inLine - 1)) : 0;
  nodes.forEach((node, i) => Object.assign(node, { x: left + i % inLine * (box + gap), y: top + Math.floor(i / inLine) * (BOX + 4), width: box }));
  return top + Math.max(1, lines) * (BOX + 4);
}

function nodesOf(cluster) {
  const nodes = cluster.instances.map(i => ({
    id: i.instance_id, role: i.role, target: `instance-${i.instance_id}`, bad: isSilent(i), fill: fullness(i),
    about: `${i.instance_id}, ${i.role}${isSilent(i) ? ", silent" : i.draining ? ", drains" : ""}`,
  }));
  const present = new Set(nodes.map(node => node.id));
  for (const event of cluster.events) {
    if (event.what === "left" && !present.has(event.instance_id))
      nodes.push({ id: event.instance_id, role: event.role, bad: true, gone: true, about: `${event.instance_id}, ${event.role}, gone` });
  }
  const gateways = new Set([cluster.gateway, ...cluster.gateways]);
  for (const id of gateways) nodes.push({ id, role: "gateway", about: `${id}, gateway${id === cluster.gateway ? ", which shows this page" : ""}` });
  nodes.push({ id: "conductor", role: "conductor", bad: cluster.lost, about: cluster.lost ? "conductor, does not answer" : "conductor" });
  return nodes.sort((a, b) => compare(a.id, b.id));
}

function fullness(instance) {
  const { load } = instance;
  if (instance.role === "store") return load.capacity_bytes ? 1 - load.free_bytes / load.capacity_bytes : 0;
  return instance.num_blocks ? (load.held_blocks + load.leased_blocks) / instance.num_blocks : 0;
}

function draw(node) {
  const made = svg("g", { class: [node.bad && "bad", node.gone && "gone", node.noted && "noted"].filter(Boolean).join(" "), "data-target": node.target });
  made.append(svg("rect", { x: node.x, y: node.y, width: node.width, height: BOX, rx: 4 }));
  if (node.fill) made.append(svg("rect", { class: "fill", x: node.x + 2, y: node.y + BOX - 6, width: Math.max(0, (node.width - 4) * Math.min(1, node.fill)), height: 4 }));
  const label = node.width >= 7.2 * node.id.length + 6 ? node.id : node.id.split("-").at(-1);
  made.append(svg("text", { x: node.x + node.width / 2, y: node.y + 16, "text-anchor": "middle" }, label), svg("title", {}, node.about));
  return made;
}

function arrow(from, to, tokens, most, number) {
  const x0 = from.x + from.width / 2, x1 = to.x + to.width / 2, down = from.y < to.y;
  const y0 = down ? from.y + BOX : from.y, y1 = down ? to.y : to.y + BOX, sideways = from.y === to.y;
  const moving = from.role === "store" ? to : from; // who reads or writes the KV
  const failing = from.bad || to.bad || moving.failing && from.role !== "gateway", bend = sideways ? BOX : (y1 - y0) / 2;
  const path = sideways ? `M${x0},${y0}C${x0},${y0 - bend},${x1},${y1 - bend},${x1},${y1}` : `M${x0},${y0}C${x0},${y0 + bend},${x1},${y1 - bend},${x1},${y1}`;
  const made = svg("path", { d: path, "marker-end": failing ? "url(#bad-tip)" : "url(#tip)", "stroke-width": thickness(tokens, most, number), class: failing ? "bad" : tokens < .05 ? "idle" : "" });
  made.append(svg("title", {}, `${from.id} → ${to.id}: ${rate(tokens)} tokens/s`));
  return made;
}

function tip(id, colour) {
  const made = svg("marker", { id, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 9, markerHeight: 9, markerUnits: "userSpaceOnUse", orient: "auto" });
  made.append(svg("polygon", { points: "0,0 8,4 0,8", fill: `var(${colour})` }));
  return made;
}

// `most`: tokens of the thickest arrow; of many arrows all are thinner.
const thickness = (tokens, most, number) => 1 + Math.max(2, THICKEST - number / 16) * Math.sqrt(tokens / most);

// All answers, along the left edge: from the decode workers up to the gateways.
function answer(gateways, decodes, tokens, most, number) {
  if (!gateways.length || !decodes.length) return svg("g", {});
  const from = decodes[0].y + BOX / 2, to = gateways[0].y + BOX / 2;
  const made = svg("path", { class: "answers", d: `M${LEFT},${from}H4V${to}H${LEFT}`, "marker-end": "url(#tip)", "stroke-width": thickness(tokens, most, number) });
  made.append(svg("title", {}, `decode workers → gateways: ${rate(tokens)} tokens/s`));
  return made;
}

// `failing`: names of processes whose transfers failed in the last minute; `noted`: of instances that a finding is about.
export function drawMap(cluster, flows, failing, noted) {
  const width = Math.max(280, $("map").clientWidth - 24), nodes = nodesOf(cluster), of = role => nodes.filter(node => node.role === role);
  for (const node of nodes) {
    node.failing = failing.has(node.id);
    node.noted = node.failing || noted.has(node.id);
    if (node.failing) node.about += ", transfers failed";
  }
  const drawing = svg("svg", { role: "img" }), inner = width - LEFT, rows = [];
  const heading = (text, x, y) => rows.push(svg("text", { class: "row", x, y: y - 6 }, text));
  const title = (role, name) => `${name} (${count(of(role).filter(n => !n.gone).length)})`;
  let y = 18;
  heading(title("gateway", "gateways"), LEFT, y);
  const head = Math.max(110, inner * .25);
  const belowGateways = place(of("gateway"), LEFT, inner - head - GAP * 2, y);
  place(of("conductor"), LEFT + inner - head, head, y);
  y = belowGateways + ROW - BOX;
  heading(title("prefill", "prefill"), LEFT, y);
  y = place(of("prefill"), LEFT, inner, y) + ROW - BOX;
  const stores = of("store"), part = stores.length ? Math.min(.5, Math.max(.25, stores.length / (stores.length + of("decode").length))) : 0;
  heading(title("decode", "decode"), LEFT, y);
  if (part) heading(title("store", "stores"), LEFT + inner * (1 - part) + GAP * 2, y);
  y = Math.max(place(of("decode"), LEFT, inner * (1 - part), y), part ? place(stores, LEFT + inner * (1 - part) + GAP * 2, inner * part - GAP * 2, y) : 0);
  const known = new Map(nodes.map(node => [node.id, node])), find = name => known.get(name === "gateway" ? cluster.gateway : name);
  const shown = flows.filter(flow => flow[1] !== "gateway").map(([from, to, tokens]) => [find(from), find(to), tokens]).filter(([from, to]) => from && to);
  const answers = sum(flows.filter(flow => flow[1] === "gateway").map(flow => flow[2]));
  const most = Math.max(1, answers, ...shown.map(flow => flow[2]));
  drawing.setAttribute("viewBox", `0 0 ${width} ${y + 4}`);
  drawing.setAttribute("height", y + 4);
  drawing.setAttribute("aria-label", `Map of the cluster: ${nodes.filter(n => !n.gone).length} processes, ${shown.length} flows; failing: ${nodes.filter(n => n.bad || n.failing).map(n => n.about).join("; ") || "none"}`);
  drawing.append(tip("tip", "--accent"), tip("bad-tip", "--bad"), ...shown.map(([from, to, tokens]) => arrow(from, to, tokens, most, shown.length)));
  if (answers >= .05) drawing.append(answer(of("gateway"), of("decode"), answers, most, shown.length));
  drawing.append(...rows, ...nodes.map(draw));
  for (const each of drawing.querySelectorAll("g[data-target]")) each.addEventListener("click", () => goTo(each.dataset.target)); // the cards are the keyboard's way
  const legend = element("p", `Arrows: tokens per second through this gateway; the thickest ${rate(Math.max(answers, ...shown.map(f => f[2])))}. Bars: KV memory in use. Red: silent, gone, or transfers fail; amber: see above.`, "dim");
  $("map").replaceChildren(drawing, legend);
}
