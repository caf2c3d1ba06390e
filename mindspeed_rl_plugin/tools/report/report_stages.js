"use strict";
// Stages: when each ran on every rank, its time, and its memory.

const stageNames = data.stages.names;
const stageColor = (k) => (stageNames[k] === "between stages" ? "var(--idle)" : `var(--c${k % 10})`);

// What async engines do: work, wait (for two reasons), read and load weights.
const kindColor = (kind) => ({ generate: "var(--c6)", "back-pressure": "var(--idle)", version: "var(--c7)", pull: "var(--c8)", pause: "var(--c9)" })[kind] || "var(--c5)";
const kindText = { generate: "engine: samples", "back-pressure": "engine: back-pressure", version: "engine: waits for weights", pull: "engine: reads weights", pause: "engine: loads weights" };

function stageLegend() {
  const item = (color, text) => element("span", {}, element("i", { style: `background:${color}` }), text);
  return element("div", { class: "legend" }, stageNames.map((n, k) => item(stageColor(k), n)),
    data.timeline.kinds.map((kind) => item(kindColor(kind), kindText[kind] || kind)));
}

// ---------------------------------------------------------------- timeline

// Wall time to pixels. A long time in which no rank did anything (the job was down between two attempts)
// is drawn short, so that the rest is visible.
function timeScale(events, left, width) {
  const busy = [];
  for (const [, , , start, length] of [...events].sort((a, b) => a[3] - b[3])) {
    const last = busy[busy.length - 1];
    if (last && start <= last[1]) last[1] = Math.max(last[1], start + length);
    else busy.push([start, start + length]);
  }
  const total = busy.reduce((sum, [a, b]) => sum + b - a, 0) || 1;
  const knots = [];
  let at = 0;
  busy.forEach(([start, end], k) => {
    if (k > 0) {
      const gap = start - busy[k - 1][1];
      const squeezed = gap > 0.5 * total;
      at += squeezed ? 0.04 * total : gap;
      if (squeezed) knots[knots.length - 1].idle = gap;
    }
    knots.push({ time: start, at }, { time: end, at: (at += end - start) });
  });
  const whole = at || 1;
  const toPixel = (time) => {
    let k = 0;
    while (k < knots.length - 2 && knots[k + 1].time < time) k++;
    const [a, b] = [knots[k], knots[k + 1]];
    const share = b.time > a.time ? (time - a.time) / (b.time - a.time) : 0;
    return left + ((a.at + share * (b.at - a.at)) / whole) * width;
  };
  return { toPixel, breaks: knots.filter((k) => k.idle), begin: knots[0].time, end: knots[knots.length - 1].time, squeezed: knots.some((k) => k.idle) };
}

// Lane of each event of a rank: stages that run at the same time are in different lanes, one below the other.
// An overlap of less than a millisecond is ignored, as rounding.
function lanesOf(events) {
  const ends = [];
  return events.map((event) => {
    let lane = ends.findIndex((end) => end <= event[3] + 1e-3);
    if (lane < 0) lane = ends.length;
    ends[lane] = event[3] + event[4];
    return lane;
  });
}

class Timeline {
  constructor(parent) {
    const { iterations } = data.timeline;
    this.all = iterations;
    this.first = element("input", { type: "number", id: "from", min: iterations[0], max: iterations.at(-1), "aria-label": "first iteration shown" });
    this.last = element("input", { type: "number", id: "to", min: iterations[0], max: iterations.at(-1), "aria-label": "last iteration shown" });
    for (const input of [this.first, this.last]) input.addEventListener("change", () => this.select(Number(this.first.value), Number(this.last.value)));
    this.holder = element("div", { id: "timeline" });
    const card = element("div", { class: "card wide" },
      element("div", { class: "head" }, element("h3", {}, "When each stage ran"),
        element("div", { class: "controls" }, "iterations", this.first, "to", this.last,
          element("button", { type: "button", id: "earlier", onclick: () => this.move(-1) }, "◀ earlier"),
          element("button", { type: "button", id: "later", onclick: () => this.move(1) }, "later ▶"))),
      element("p", { class: "about" }, this.note()), stageLegend(), this.holder);
    parent.append(card);
    const end = iterations.length - 1;
    this.range = [iterations[Math.max(0, end - 2)], iterations[end]];
    this.sync();
    redrawOnResize(this.holder, (width) => this.draw((this.width = width)));
  }

  note() {
    const { ranks, ranks_total: total, iterations_left_out: left } = data.timeline;
    let text = "Wall clock of every rank, one bar per stage; clocks of different machines may differ.";
    if (data.timeline.processes.length) text += " Below the ranks: generators, and engines that joined; in the stage generate, ranks wait for responses of these. Dashed lines: weights are published.";
    if (ranks.length < total) text += ` ${ranks.length} of ${total} ranks are shown.`;
    if (left) text += ` The first ${left} iterations are left out to keep the file small.`;
    return text;
  }

  select(from, to) {
    const clamp = (v) => Math.min(Math.max(v, this.all[0]), this.all.at(-1));
    this.range = [Math.min(clamp(from), clamp(to)), Math.max(clamp(from), clamp(to))];
    this.sync();
    this.draw();
  }

  move(direction) {
    const size = this.range[1] - this.range[0];
    const step = direction * (size + 1);
    const start = Math.min(Math.max(this.range[0] + step, this.all[0]), this.all.at(-1) - size);
    this.select(start, start + size);
  }

  sync() {
    [this.first.value, this.last.value] = this.range;
  }

  draw(width = this.width) {
    const events = data.timeline.events.filter((e) => e[2] >= this.range[0] && e[2] <= this.range[1]);
    if (!events.length) return this.holder.replaceChildren(element("p", { class: "muted" }, "No stage ran in these iterations."));
    if (events.length > 6000) {
      return this.holder.replaceChildren(element("p", { class: "muted" }, `${events.length} stages in this range are too many to draw; choose fewer iterations.`));
    }
    const left = data.timeline.processes.length ? 118 : 58;
    const scale = timeScale(events, left, width - left - 8);
    const root = shape("svg", { role: "img", "aria-label": "stage timeline" });
    let y = 18;
    for (const rank of data.timeline.ranks) {
      const own = events.filter((e) => e[0] === rank);
      if (!own.length) continue;
      const lanes = lanesOf(own);
      const rows = Math.max(...lanes) + 1;
      const height = rows > 1 ? 14 : data.timeline.ranks.length > 4 ? 18 : 26;
      root.append(shape("text", { x: 0, y: y + (rows * height) / 2 + 4 }, `rank ${rank}`));
      own.forEach((event, k) => root.append(this.bar(event, scale, y + lanes[k] * height, height)));
      y += rows * height + 5;
    }
    const shown = (start, end) => end >= scale.begin && start <= scale.end;
    data.timeline.processes.forEach((name, process) => {
      const own = data.timeline.apart.filter((e) => e[0] === process && shown(e[2], e[2] + e[3]));
      if (!own.length) return;
      const lanes = lanesOf(own.map((e) => [0, 0, 0, e[2], e[3]]));
      const rows = Math.max(...lanes) + 1;
      root.append(shape("text", { x: 0, y: y + (rows * 14) / 2 + 4 }, data.timeline.labels[process]));
      own.forEach((event, k) => root.append(this.spanApart(event, name, scale, y + lanes[k] * 14)));
      y += rows * 14 + 5;
    });
    for (const [version, time] of data.timeline.marks.filter(([, time]) => shown(time, time))) {
      const x = scale.toPixel(time);
      root.append(shape("line", { class: "published", x1: x, x2: x, y1: 12, y2: y, "data-version": version }),
        shape("text", { class: "published", x: x + 2, y: y + 8 }, `v${version}`));
    }
    if (data.timeline.marks.length) y += 10;
    this.drawScale(root, events, scale, y);
    root.setAttribute("viewBox", `0 0 ${width} ${y + 20}`);
    root.setAttribute("height", y + 20);
    this.holder.replaceChildren(root);
  }

  bar([rank, stage, iteration, start, length, peak], scale, y, height) {
    const [x, end] = [scale.toPixel(start), scale.toPixel(start + length)];
    const memory = peak === null ? "" : `\npeak ${bytes(peak)}`;
    const text = `${stageNames[stage]}, ${seconds(length)}\nrank ${rank}, iteration ${iteration}${memory}`;
    return shape("rect", {
      class: "span", x: x.toFixed(2), y, width: Math.max(0.75, end - x - 0.4).toFixed(2), height: height - 1, rx: 2,
      fill: stageColor(stage), "data-stage": stageNames[stage], "data-rank": rank, "data-iteration": iteration,
      onpointermove: (event) => showTip(event, text), onpointerdown: (event) => showTip(event, text), onpointerleave: hideTip,
    });
  }

  spanApart([process, kind, start, length], name, scale, y) {
    const what = data.timeline.kinds[kind];
    const [x, end] = [start, start + length].map((t) => scale.toPixel(Math.min(Math.max(t, scale.begin), scale.end)));
    const text = `${kindText[what] || what}, ${seconds(length)}\n${name}`;
    return shape("rect", {
      class: "span", x: x.toFixed(2), y, width: Math.max(0.75, end - x - 0.4).toFixed(2), height: 13, rx: 2, fill: kindColor(what),
      "data-process": name, "data-kind": what,
      onpointermove: (event) => showTip(event, text), onpointerdown: (event) => showTip(event, text), onpointerleave: hideTip,
    });
  }

  drawScale(root, events, scale, bottom) {
    const begins = new Map();
    for (const [, , iteration, start] of events) begins.set(iteration, Math.min(begins.get(iteration) ?? Infinity, start));
    let free = 0;
    for (const [iteration, start] of begins) {
      const x = scale.toPixel(start);
      root.prepend(shape("line", { class: "boundary", x1: x, x2: x, y1: 12, y2: bottom }));
      if (x < free) continue;
      root.append(shape("text", { x, y: 10 }, `iteration ${iteration}`));
      free = x + 84;
    }
    for (const gap of scale.breaks) {
      const x = scale.toPixel(gap.time);
      root.append(shape("text", { x, y: bottom + 14 }, `⋯ ${seconds(gap.idle)} idle`));
    }
    if (scale.squeezed) return;
    for (const t of ticks(0, scale.end - scale.begin, Math.max(2, this.width / 130))) {
      root.append(shape("text", { x: scale.toPixel(scale.begin + t), y: bottom + 14, "text-anchor": t ? "middle" : "start" }, `${t} s`));
    }
  }
}

// ---------------------------------------------------------------- time of each stage

class StageBars {
  constructor(parent) {
    this.share = false;
    this.legend = element("div", { class: "legend" });
    this.holder = element("div", { id: "stage-bars" });
    const toggle = element("button", { type: "button", id: "as-share", "aria-pressed": "false", onclick: () => {
      this.share = !this.share;
      toggle.setAttribute("aria-pressed", String(this.share));
      this.draw();
    } }, "as share");
    parent.append(element("div", { class: "card" }, element("div", { class: "head" }, element("h3", {}, "Time of each stage"),
      element("div", { class: "controls" }, toggle)),
    element("p", { class: "about" }, "Seconds per iteration, mean over ranks; if stages overlap, only the stage that started last counts. Between stages: a rank waits for other ranks, or Megatron logs, saves or evaluates."),
    this.legend, this.holder));
    this.readout(null);
    redrawOnResize(this.holder, (width) => this.draw((this.width = width)));
  }

  // Bins of iterations, so that a bar is wide enough to see: {first, last, means (seconds per stage), total}.
  bins(width) {
    const { iterations, seconds: spent } = data.stages;
    const size = Math.ceil(iterations.length / Math.max(1, Math.floor(width / 4)));
    const out = [];
    for (let k = 0; k < iterations.length; k += size) {
      const end = Math.min(k + size, iterations.length);
      const means = stageNames.map((n) => spent[n].slice(k, end).reduce((a, b) => a + b, 0) / (end - k));
      out.push({ first: iterations[k], last: iterations[end - 1], means, total: means.reduce((a, b) => a + b, 0) });
    }
    return out;
  }

  draw(width = this.width) {
    const [left, top, height, bottom] = [46, 8, 230, 22];
    const down = height - top - bottom;
    const bins = this.bins(width - left);
    const limit = this.share ? 1 : Math.max(...bins.map((b) => b.total)) * 1.04 || 1;
    const step = (width - left - 4) / bins.length;
    const root = shape("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "time of each stage over iterations" });
    for (const value of ticks(0, limit, 4)) {
      const y = top + down * (1 - value / limit);
      root.append(shape("line", { class: "gridline", x1: left, x2: width, y1: y, y2: y }),
        shape("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, this.share ? `${Math.round(value * 100)}%` : `${number(value)} s`));
    }
    bins.forEach((bin, k) => this.column(root, bin, left + k * step, step, (v) => (v / (this.share ? bin.total || 1 : limit)) * down, top + down));
    const [first, last] = [bins[0].first, bins[bins.length - 1].last];
    for (const value of last > first ? ticks(first, last, Math.max(2, width / 90)).filter(Number.isInteger) : [first]) {
      const k = bins.findIndex((bin) => bin.last >= value);
      root.append(iterationLabel(left + (k + 0.5) * step, height - 6, value, width));
    }
    root.addEventListener("pointerleave", () => this.readout(null));
    this.holder.replaceChildren(root);
  }

  column(root, bin, x, step, tall, base) {
    const group = shape("g", { onpointermove: () => this.readout(bin), onpointerdown: () => this.readout(bin) });
    let y = base;
    bin.means.forEach((value, k) => {
      const h = tall(value);
      if (h <= 0) return;
      y -= h;
      group.append(shape("rect", { class: "part", x: x.toFixed(2), y: y.toFixed(2), width: Math.max(0.5, step - (step > 5 ? 1 : 0)).toFixed(2),
        height: h.toFixed(2), fill: stageColor(k), "data-stage": stageNames[k] }));
    });
    root.append(group);
  }

  readout(bin) {
    const { table } = data.stages;
    const value = (k) => (bin ? (this.share ? `${((100 * bin.means[k]) / (bin.total || 1)).toFixed(1)}%` : seconds(bin.means[k])) : `${(100 * table[k].share).toFixed(1)}%`);
    const items = stageNames.map((n, k) => legendItem(stageColor(k), n, value(k)));
    const range = bin && (bin.first === bin.last ? `iteration ${bin.first}` : `iterations ${bin.first} to ${bin.last}`);
    items.push(element("span", { class: "muted" }, range || "share of the whole run"));
    this.legend.replaceChildren(...items);
  }
}

// ---------------------------------------------------------------- memory, table

function drawMemory(parent) {
  const measured = stageNames.map((n, k) => [n, k]).filter(([n]) => data.stages.peak[n]);
  if (!measured.length) {
    parent.append(element("div", { class: "card empty" }, element("h3", {}, "Memory of each stage"),
      element("p", { class: "about" }, "This run recorded no memory peaks, since it had no memory meter.")));
    return;
  }
  const { iterations, peak } = data.stages;
  const lines = measured.map(([n, k]) => {
    const has = (_, i) => peak[n][i] !== null;
    return { name: `peak/${n}`, label: n, x: iterations.filter(has), values: peak[n].filter(has), color: stageColor(k) };
  });
  new LineChart({
    title: "Memory of each stage", about: `Largest memory use during the stage, on the rank that used most: ${data.run.memory || "memory"}.`,
    x: iterations, lines, format: bytes, unit: byteUnit(Math.max(...lines.flatMap((l) => minmax(l.values)))), rough: true,
  }).mount(parent);
}

function drawStageTable(parent) {
  const columns = ["stage", "share of time", "total", "median", "slowest rank", "peak memory"];
  const widest = Math.max(...data.stages.table.map((r) => r.share));
  const body = data.stages.table.map((row, k) => element("tr", {},
    element("td", {}, element("i", { class: "share", style: `width:10px;background:${stageColor(k)}` }), row.stage),
    element("td", {}, element("i", { class: "share", style: `width:${(90 * row.share) / (widest || 1)}px;background:${stageColor(k)}` }), `${(100 * row.share).toFixed(1)}%`),
    element("td", { class: "num" }, seconds(row.seconds)),
    element("td", { class: "num" }, seconds(row.median)),
    element("td", { class: "num" }, `${row.slowest_rank} (${row.slowest_over_mean.toFixed(2)}× mean)`),
    element("td", { class: "num" }, bytes(row.peak))));
  parent.append(element("div", { class: "card wide" }, element("div", { class: "scroll" }, element("table", { id: "stage-table" },
    element("thead", {}, element("tr", {}, columns.map((c, k) => element("th", { class: k > 1 ? "num" : null }, c)))), element("tbody", {}, body)))));
}

function drawStages() {
  const body = byId("stages-body");
  if (!data.timeline.events.length) {
    body.append(element("p", { class: "muted" }, "The run directory has no stage events (events-rank*.jsonl), so there are no timeline, times and memory to show."));
    return;
  }
  new Timeline(body);
  const pair = element("div", { class: "grid pair" });
  body.append(pair);
  new StageBars(pair);
  drawMemory(pair);
  drawStageTable(body);
}

drawStages();
