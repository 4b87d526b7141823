// What the tests of the dashboard ask the page for (tests/e2e/test_dashboard.py).

// Number of saturated pixels of a chart; its axes and grid are grey.
globalThis.coloured = id => {
  const canvas = document.querySelector(`#${id} canvas`);
  if (!canvas) return 0;
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let found = 0;
  for (let i = 0; i < data.length; i += 4) {
    const rgb = data.slice(i, i + 3);
    found += data[i + 3] > 128 && Math.max(...rgb) - Math.min(...rgb) > 50;
  }
  return found;
};

// Elements that are narrower than their content or extend beyond the window, and the page's horizontal overflow.
globalThis.cutOff = () => [...document.querySelectorAll("body *")].filter(e => {
  const box = e.getBoundingClientRect(), style = getComputedStyle(e);
  if (!box.width || style.position === "absolute" || e.closest("[hidden], dialog:not([open])")) return false;
  const isCut = style.overflowX !== "visible" && e.scrollWidth > e.clientWidth + 1;
  return isCut || box.right > innerWidth + 1 || box.left < -1;
}).map(e => e.outerHTML.slice(0, 120));
globalThis.sideways = () => document.documentElement.scrollWidth - document.documentElement.clientWidth;

// The element that has the focus, and whether one sees that.
globalThis.focused = () => {
  const e = document.activeElement, style = getComputedStyle(e);
  return { key: e.dataset.key || e.id || e.textContent.trim().slice(0, 40), tag: e.tagName,
    outline: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0 };
};

// Where the waterfall's last bar ends, in percent of the request's time.
globalThis.waterfallEnd = () => Math.max(...[...document.querySelectorAll(".waterfall .span:not(.predicted)")]
  .map(e => parseFloat(e.style.left) + parseFloat(e.style.width)));

Promise.all([import("./assets/health.js"), import("./assets/history.js")]).then(modules => { globalThis.rules = modules; });

// The findings about a healthy cluster after a change to what the gateway answers.
globalThis.judged = change => {
  const worker = (instance_id, role) => ({ instance_id, role, draining: false, last_heard_s: .5, num_blocks: 100,
    load: { num_waiting: 0, num_running: 2, held_blocks: 10, leased_blocks: 0 } });
  const [{ findings }, { History }] = rules, history = new History(), at = [...Array(12).keys()].map(i => 1000 + 10 * i);
  const constant = value => at.map(() => value), latency = () => ({ p50: .1, p95: .2, p99: .3, count: 50 });
  const series = { "time/queue": constant(1), "time/prefill": constant(1) };
  for (const id of ["decode-0", "decode-1"]) Object.assign(series, { [`steps/${id}`]: constant(10), [`step_s/${id}`]: constant(.2) });
  const known = {
    history, series, constant,
    cluster: { at: 1115, events: [], instances: [worker("prefill-0", "prefill"), worker("decode-0", "decode"), worker("decode-1", "decode")] },
    figures: { ttft_s: latency(), tbt_s: latency(), slo: { ttft_s: 1, tbt_s: 1 }, rejections: { full: 3 }, failures: { lost: 2 } },
  };
  change(known);
  history.take({ gateway: "g", number: 12, at, interval_s: 10, series });
  return findings(known);
};

// A change, then the level of the one finding that it makes, a part of its sentence, and the element to which it leads.
globalThis.SICK = [
  [k => { k.cluster = undefined; }, "bad", "conductor does not answer", "map"],
  [k => { k.cluster = undefined; k.error = "refused"; }, "bad", "No answer: refused", "map"],
  [k => { k.cluster.instances.shift(); }, "bad", "no prefill worker", "map"],
  [k => { k.cluster.events = [{ at: 1085, what: "left", instance_id: "store-0", role: "store" }]; }, "bad", "store-0 (store) left the cluster 30 s ago", "map"],
  [k => { k.cluster.events = [{ at: 1085, what: "restarted", instance_id: "decode-0", role: "decode" }]; }, "warn", "decode-0 restarted 30 s ago", "instance-decode-0"],
  [k => { k.cluster.instances[1].last_heard_s = 8; }, "bad", "decode-0 (decode) has been silent for 8 s", "instance-decode-0"],
  [k => { k.cluster.instances[1].draining = true; }, "warn", "decode-0 drains", "instance-decode-0"],
  [k => { k.cluster.instances[0].load.num_waiting = 20; }, "warn", "20 requests wait at prefill workers", "chart-waiting"],
  [k => { k.series["waiting/prefill-0"] = [...k.constant(0).slice(1), 16]; k.cluster.instances[0].load.num_waiting = 20; }, "bad", "queue of prefill workers grows: 20 requests wait, a minute ago 0", "chart-waiting"],
  [k => { k.series["waiting/prefill-0"] = k.constant(18); k.cluster.instances[0].load.num_waiting = 20; }, "warn", "20 requests wait at prefill workers", "chart-waiting"],
  [k => { k.series["waiting/decode-0"] = k.constant(20); k.cluster.instances[1].load.num_waiting = 20; }, "warn", "20 requests wait at decode-0, at a typical other decode worker 0", "chart-waiting"],
  [k => { Object.assign(k.cluster.instances[2].load, { num_waiting: 1, leased_blocks: 90 }); }, "warn", "decode-1's KV memory is 100 % full", "chart-kv"],
  [k => { k.figures.ttft_s.p95 = 4; k.series["time/queue"] = k.constant(9); }, "bad", "p95 4.00 s, objective 1.00 s: 90 % of the wait is the prefill queue", "chart-time"],
  [k => { k.figures.tbt_s.p95 = 4; }, "bad", "Gaps between tokens are long", "chart-step"],
  [k => { k.series["step_s/decode-1"] = k.constant(.9); }, "warn", "decode-1 is slow: a step takes 90 ms, at a typical other decode worker 20 ms", "chart-step"],
  [k => { k.series.rejected = k.constant(.1); }, "bad", "6 requests were rejected in the last minute, mostly: full", "chart-lost"],
  [k => { k.series.failed = k.constant(.1); }, "bad", "6 requests were not finished in the last minute, mostly: lost", "chart-lost"],
  [k => { k.series.rail_failures = k.constant(.05); }, "warn", "3 transfers failed in the last minute", "rails"],
];

// What is wrong with the findings after a change, or nothing.
globalThis.misjudged = ([change, level, sentence, target]) => {
  const found = judged(change), [one] = found;
  const right = found.length === 1 && one.level === level && one.text.includes(sentence) && one.target[0] === target && document.getElementById(target);
  return right ? "" : `${sentence}: ${JSON.stringify(found)}`;
};

// From now on the cluster has 64 decode workers, and a 65th that has left.
globalThis.enlarge = () => {
  const real = fetch;
  globalThis.fetch = async (path, options) => {
    const reply = await real(path, options);
    if (path !== "v1/cluster") return reply;
    const body = await reply.json(), one = body.instances.find(i => i.role === "decode");
    const many = [...Array(64).keys()].map(i => ({ ...one, instance_id: `decode-${i}` }));
    body.events = [{ at: body.at - 5, what: "left", instance_id: "decode-64", role: "decode" }];
    body.instances = [...body.instances.filter(i => i.role !== "decode"), ...many];
    return new Response(JSON.stringify(body));
  };
};
0;
