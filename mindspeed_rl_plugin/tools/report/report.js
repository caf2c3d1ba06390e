"use strict";
// Helpers, the head of the page, and the curves. Loaded first.

const data = JSON.parse(document.getElementById("data").textContent);
const resumes = (data.run.starts || []).map((s) => s.iteration).filter((i) => i > 0);
const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function shape(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  // append() makes text nodes of strings, so no text of a sample is parsed as HTML.
  node.append(...children.flat().filter((c) => c !== null && c !== undefined));
  return node;
}

function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace(/\.?0*e\+?/, "e");
  return size >= 1e4 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
}

function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let k = 0;
  while (value >= 1024 && k < units.length - 1) [value, k] = [value / 1024, k + 1];
  return `${Number(value.toPrecision(3))} ${units[k]}`;
}

function byteUnit(most) {
  return 1024 ** Math.max(0, Math.min(4, Math.floor(Math.log2(most || 1) / 10)));
}

function seconds(value) {
  if (value < 1) return `${Number((value * 1000).toPrecision(3))} ms`;
  if (value < 120) return `${Number(value.toPrecision(3))} s`;
  const minutes = Math.round(value / 60);
  return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((m) => m * power >= rough) * power;
  const out = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) out.push(Number((k * step).toPrecision(12)));
  return out;
}

function logTicks(low, high) {
  const out = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) {
    for (const m of high / low < 30 ? [1, 2, 5] : [1]) {
      const value = m * 10 ** e;
      if (value >= low * 0.999 && value <= high * 1.001) out.push(value);
    }
  }
  const skip = Math.ceil(out.length / 5);
  return out.filter((_, k) => k % skip === 0);
}

// Exponential moving average, corrected for its start at 0; gaps stay gaps.
function smoothed(values, strength) {
  let mean = 0;
  let weight = 0;
  return values.map((v) => {
    if (v === null) return null;
    mean = strength * mean + (1 - strength) * v;
    weight = strength * weight + (1 - strength);
    return mean / weight;
  });
}

function legendItem(color, label, value, hint) {
  return element("span", { title: hint }, element("i", { style: `background:${color}` }), `${label} `, element("b", {}, value));
}

function showTip(event, text) {
  const tip = byId("tip");
  tip.textContent = text;
  tip.hidden = false;
  const width = tip.offsetWidth;
  tip.style.left = `${Math.max(6, Math.min(event.clientX + 14, innerWidth - width - 6))}px`;
  tip.style.top = `${event.clientY + tip.offsetHeight + 24 > innerHeight ? event.clientY - tip.offsetHeight - 12 : event.clientY + 16}px`;
}

function hideTip() {
  byId("tip").hidden = true;
}

// Draws immediately, and again whenever the width of `node` changes.
function redrawOnResize(node, draw) {
  let width = 0;
  const update = () => {
    const now = Math.floor(node.clientWidth);
    if (now > 0 && now !== width) draw((width = now));
  };
  new ResizeObserver(update).observe(node);
  update();
}

// ---------------------------------------------------------------- line charts

const smoothing = { on: false, strength: 0.8 };
const charts = [];

// One card with a line chart. spec: title, about, x (all iterations), lines [{name, label, x, values, color}]
// (null in values: a gap); optional: band {x, middle, spread} around the first line, range [low, high], log,
// rough (never smoothed), format, unit (ticks are round multiples of it).
class LineChart {
  constructor(spec) {
    this.spec = { format: number, ...spec };
    this.legend = element("div", { class: "legend" });
    this.holder = element("div", {});
    // Next to the title: in the legend it could start a new line, and so move the chart under the pointer.
    this.at = element("span", { class: "muted small" });
    this.card = element("div", { class: "card chart", "data-chart": spec.title },
      element("div", { class: "head" }, element("h3", {}, spec.title), this.at),
      element("p", { class: "about" }, spec.about || ""), this.legend, this.holder);
    charts.push(this);
  }

  mount(parent) {
    parent.append(this.card);
    redrawOnResize(this.holder, (width) => this.draw(width));
    this.readout(null);
  }

  draw(width = this.width) {
    this.width = width;
    this.height = 190;
    const { spec } = this;
    const frame = { left: 54, right: 10, top: 8, bottom: 22 };
    const [low, high] = this.domain();
    const [first, last] = [spec.x[0], spec.x[spec.x.length - 1]];
    const across = width - frame.left - frame.right;
    const down = this.height - frame.top - frame.bottom;
    const position = (v) => (spec.log && low > 0 ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low));
    this.px = (i) => frame.left + (last === first ? across / 2 : ((i - first) / (last - first)) * across);
    this.py = (v) => frame.top + down * (1 - position(v));
    const root = shape("svg", { viewBox: `0 0 ${width} ${this.height}`, height: this.height, role: "img", "aria-label": spec.title });
    this.drawAxes(root, frame, low, high, first, last, width);
    for (const at of resumes.filter((i) => i >= first && i < last)) {
      const x = this.px(at + 0.5);
      root.append(shape("line", { class: "resumed", x1: x, x2: x, y1: frame.top, y2: this.height - frame.bottom }, shape("title", {}, `resumed at iteration ${at}`)));
    }
    if (spec.band && !smoothing.on) this.drawBand(root);
    spec.lines.forEach((line) => this.drawLine(root, line));
    this.cross = shape("line", { class: "cross", y1: frame.top, y2: this.height - frame.bottom, visibility: "hidden" });
    root.append(this.cross);
    const point = (event) => {
      const box = root.getBoundingClientRect();
      hoverAll(first + ((event.clientX - box.left - frame.left) / across) * (last - first));
    };
    root.addEventListener("pointermove", point);
    root.addEventListener("pointerdown", point);
    root.addEventListener("pointerleave", () => hoverAll(null));
    this.holder.replaceChildren(root);
  }

  domain() {
    const { lines, range, log, band } = this.spec;
    if (range) return range;
    let all = lines.flatMap((l) => l.values).filter((v) => v !== null);
    if (band) {
      band.middle.forEach((m, k) => m !== null && band.spread[k] !== null && all.push(m - band.spread[k], m + band.spread[k]));
    }
    if (log) {
      all = all.filter((v) => v > 0);
      if (all.length) return [Math.min(...minmax(all)) / 1.3, Math.max(...minmax(all)) * 1.3];
    }
    let [low, high] = all.length ? minmax(all) : [0, 1];
    if (low === 0 && high === 0) return [0, 1];
    const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 0.5;
    const grounded = low >= 0 && low < (high - low) * 0.6;
    return [grounded ? 0 : low - margin, high + margin];
  }

  drawAxes(root, frame, low, high, first, last, width) {
    const unit = this.spec.unit || 1;
    for (const value of this.spec.log && low > 0 ? logTicks(low, high) : ticks(low / unit, high / unit, 5).map((t) => t * unit)) {
      const y = this.py(value);
      root.append(shape("line", { class: "gridline", x1: frame.left, x2: width - frame.right, y1: y, y2: y }),
        shape("text", { x: frame.left - 6, y: y + 4, "text-anchor": "end" }, this.spec.format(value)));
    }
    for (const value of last > first ? ticks(first, last, Math.max(2, width / 90)).filter(Number.isInteger) : [first]) {
      root.append(iterationLabel(this.px(value), this.height - 6, value, width));
    }
  }

  drawLine(root, line) {
    const shown = this.shown(line);
    const points = shown.filter((v) => v !== null).length;
    if (shown !== line.values) root.append(shape("path", { class: "line raw", stroke: line.color, d: this.path(line.x, line.values) }));
    root.append(shape("path", { class: "line", stroke: line.color, "data-series": line.name, d: this.path(line.x, shown) }));
    if (points > 40) return;
    shown.forEach((v, k) => {
      if (v === null || (this.spec.log && v <= 0)) return;
      root.append(shape("circle", { cx: this.px(line.x[k]).toFixed(2), cy: this.py(v).toFixed(2), r: 2.6, fill: line.color }));
    });
  }

  drawBand(root) {
    const { lines, band: { x, ...band } } = this.spec;
    const keep = x.map((_, k) => k).filter((k) => band.middle[k] !== null && band.spread[k] !== null);
    if (keep.length < 2) return;
    const edge = (k, sign) => `${this.px(x[k]).toFixed(2)} ${this.py(band.middle[k] + sign * band.spread[k]).toFixed(2)}`;
    const d = `M${keep.map((k) => edge(k, 1)).join("L")}L${keep.reverse().map((k) => edge(k, -1)).join("L")}Z`;
    root.append(shape("path", { class: "band", fill: lines[0].color, d }));
  }

  path(x, values) {
    let d = "";
    let pen = "M";
    values.forEach((v, k) => {
      if (v === null || (this.spec.log && v <= 0)) {
        pen = "M";
        return;
      }
      d += `${pen}${this.px(x[k]).toFixed(2)} ${this.py(v).toFixed(2)}`;
      pen = "L";
    });
    return d;
  }

  shown(line) {
    return smoothing.on && !this.spec.rough ? smoothed(line.values, smoothing.strength) : line.values;
  }

  // Legend with each line's value at an iteration, or its latest value before; null: the last values.
  readout(iteration) {
    const { lines, format } = this.spec;
    const items = lines.map((line) => {
      const values = this.shown(line);
      const at = iteration === null ? values.findLastIndex((v) => v !== null) : line.x.findLastIndex((x) => x <= iteration);
      return legendItem(line.color, line.label, format(at < 0 ? null : values[at]), line.hint);
    });
    this.at.textContent = iteration === null ? "" : `iteration ${iteration}`;
    this.legend.replaceChildren(...items);
  }

  hover(iteration) {
    this.readout(iteration);
    if (!this.cross) return;
    this.cross.setAttribute("visibility", iteration === null ? "hidden" : "visible");
    if (iteration === null) return;
    this.cross.setAttribute("x1", this.px(iteration));
    this.cross.setAttribute("x2", this.px(iteration));
  }
}

function iterationLabel(x, y, value, width) {
  return shape("text", { x, y, "text-anchor": x > width - 14 ? "end" : "middle" }, String(value));
}

function minmax(values) {
  return [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
}

function hoverAll(where) {
  for (const chart of charts) {
    const { x } = chart.spec;
    chart.hover(where === null ? null : x.reduce((a, b) => (Math.abs(b - where) < Math.abs(a - where) ? b : a)));
  }
}

// ---------------------------------------------------------------- which curves

const CURVES = [
  { title: "Reward", series: ["reward/mean", "eval/reward_mean"], spread: "reward/std" },
  { title: "Held-out accuracy", series: ["eval/accuracy", /^eval\/pass@/], range: [0, 1], rough: true,
    absent: "This run was not evaluated; --rl-eval-data turns evaluation on." },
  { title: "Groups", series: ["groups/solved", "groups/informative", "groups/unsolved"], range: [0, 1],
    about: "Share of prompts whose responses are all solved (solved), have different rewards (informative), or are all unsolved (unsolved). Algorithms that compare the responses of a prompt learn only from different rewards." },
  { title: "KL", series: ["kl/ref", "kl/old", "rollout/kl"], about: "Nats per token. kl/ref: KL of the policy to the reference. kl/old: of the policy to the policy at the start of the update. rollout/kl: of the policy in the engine, which sampled the rollout, to the policy at the start of the update.",
    absent: "No KL was measured: the loss has no KL term and no reference was kept." },
  { title: "Entropy", series: ["entropy"] },
  { title: "Response length", series: ["response/length_mean", "response/length_max"], about: "Trained tokens of a response." },
  { title: "Truncated responses", series: ["response/truncated"] },
  { title: "Clip fraction", series: ["clip_fraction"] },
  { title: "Probability ratio", series: ["ratio/mean", "ratio/max"], about: "Probability by the policy / by the policy at the start of the update; the mean is exactly 1 in the first step of a rollout." },
  { title: "Log-prob difference", series: ["logp_diff/mean", "logp_diff/max"], log: true, about: "|engine − trainer| over trained tokens, nats, log scale." },
  { title: "Other experts", series: ["router/differ", /^router\/differ\/\d+$/], optional: true, about: "Share of the given experts (--rl-router-replay) that the trainer's routers would not choose: of all layers, and of each." },
  { title: "Throughput", series: ["tokens_per_second"] },
  { title: "Idle time", series: [/^idle\//], range: [0, 1], optional: true, about: "Share of time in which trainers have no responses to train on, and in which async engines have no prompt (back-pressure) or wait for the weights that rows need (version)." },
  { title: "Lag", series: ["lag/mean", "lag/token_mean", "lag/max"], optional: true, about: "Number of publications after the weights that sampled a response's first token (mean, max) or a token (token_mean), until its training." },
  { title: "Segments of a response", series: ["segments/mean"], optional: true },
  { title: "Lengths, generated and trained", series: ["engines/length_mean", "response/length_mean"], optional: "engines/length_mean", about: "Mean length of the responses that engines finished, and of the responses that were trained." },
  { title: "Weights to engines", series: ["seconds/publish", "weights/pull_seconds", "weights/pause_seconds"], optional: "weights/pull_seconds", about: "Seconds that training pauses to publish weights, that an engine reads weights while it works, and that an engine pauses to load them." },
  { title: "Loss", series: ["loss"] },
  { title: "Gradient norm", series: ["grad_norm"] },
  { title: "Learning rate", series: ["lr"] },
];

function about(name) {
  const [unit, text] = data.metrics.meaning[name] || ["", ""];
  const sentence = text && text[0].toUpperCase() + text.slice(1);
  return unit && unit !== "share" ? `${sentence} [${unit}].` : sentence && `${sentence}.`;
}

function curveSpec(curve, names) {
  const { series, iterations } = data.metrics;
  const lines = names.map((name, k) => ({
    name, label: name, x: series[name].x, values: series[name].y, color: `var(--c${k % 10})`, hint: about(name),
  }));
  const spec = { ...curve, about: curve.about || about(names[0]), x: iterations, lines };
  if (curve.spread && series[curve.spread]) {
    const spread = new Map(series[curve.spread].x.map((x, k) => [x, series[curve.spread].y[k]]));
    spec.band = { x: lines[0].x, middle: lines[0].values, spread: lines[0].x.map((x) => spread.get(x) ?? null) };
    spec.about += " The band is ± one standard deviation.";
  }
  return spec;
}

function drawCurves() {
  const known = Object.keys(data.metrics.series);
  const used = new Set(["reward/std", "version", "tokens_per_second_total"]);
  for (const curve of CURVES) {
    if (typeof curve.optional === "string" && !known.includes(curve.optional)) continue;
    const names = curve.series.flatMap((s) => known.filter((n) => (s instanceof RegExp ? s.test(n) : s === n)));
    names.forEach((n) => used.add(n));
    if (names.some((n) => data.metrics.series[n].y.some((v) => v !== null))) new LineChart(curveSpec(curve, names)).mount(byId("charts"));
    else if (!curve.optional) {
      byId("charts").append(element("div", { class: "card empty", "data-chart": curve.title }, element("h3", {}, curve.title),
        element("p", { class: "about" }, curve.absent || "Not in this run's metrics.")));
    }
  }
  const others = known.filter((n) => !used.has(n) && !/^(seconds|peak_bytes)\//.test(n));
  byId("more").hidden = !others.length;
  byId("more").addEventListener("toggle", () => {
    others.forEach((n) => new LineChart(curveSpec({ title: n }, [n])).mount(byId("more-charts")));
  }, { once: true });
}

function wireSmoothing() {
  const apply = () => {
    smoothing.on = byId("smooth").checked;
    smoothing.strength = Number(byId("strength").value);
    for (const chart of charts) {
      if (chart.width) chart.draw();
      chart.readout(null);
    }
  };
  byId("smooth").addEventListener("change", apply);
  byId("strength").addEventListener("input", () => {
    byId("smooth").checked = true;
    apply();
  });
}

function drawHead() {
  const { run } = data;
  const parts = [data.place, run.algorithm].filter(Boolean);
  if (run.world_size) parts.push(`${run.world_size} rank${run.world_size > 1 ? "s" : ""}`);
  if (resumes.length) parts.push(`resumed at iteration ${resumes.join(", ")} (dashed lines in the charts)`);
  byId("subtitle").textContent = parts.join(" · ");
  byId("verdict").textContent = data.verdict;
  byId("tiles").append(...data.tiles.map((t) => element("div", { class: "tile" },
    element("span", {}, t.label), element("b", {}, t.value), element("span", {}, t.note))));
  byId("remarks").append(...data.remarks.map((r) => element("li", {}, r)));
  byId("footer").textContent = `Made ${new Date(data.made * 1000).toLocaleString()} by mindspeed_rl_plugin report.`;
  byId("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
}

drawHead();
drawCurves();
wireSmoothing();
