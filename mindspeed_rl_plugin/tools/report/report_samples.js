"use strict";
// The table of samples, with filters, sorting and pages; a click opens a row. The response of an episode is a list of messages.

const PAGE = 25;
const [EPOCH, GROUP, MEMBER, PROMPT, RESPONSE, ANSWER, REWARD, PARTS, ADVANTAGE, LENGTH, FINISH, VERSION, LOGP] = Array(13).keys();
const SAMPLE_COLUMNS = [
  { label: "sample", key: (r) => r[EPOCH] * 1e9 + r[GROUP] * 1e4 + r[MEMBER], show: (r) => `${r[EPOCH]}.${r[GROUP]}.${r[MEMBER]}`, hint: "rollout . prompt . response" },
  { label: "prompt", key: (r) => promptOf(r), text: true },
  { label: "response", key: (r) => responseOf(r), text: true },
  { label: "answer", key: (r) => r[ANSWER], show: (r) => r[ANSWER] },
  { label: "reward", key: (r) => r[REWARD], num: true },
  { label: "advantage", key: (r) => r[ADVANTAGE], num: true },
  { label: "tokens", key: (r) => r[LENGTH], num: true, hint: "response tokens" },
  { label: "finish", key: (r) => r[FINISH], show: (r) => r[FINISH] ?? "–" },
  { label: "version", key: (r) => r[VERSION], num: true, hint: "version of the oldest weights that sampled it" },
  { label: "Δlogp", key: (r) => r[LOGP], num: true, hint: "largest |engine − trainer| log-prob of the response, nats" },
];

const promptOf = (row) => data.samples.prompts[row[PROMPT]];
const isEpisode = (row) => Array.isArray(row[RESPONSE]);
const responseOf = (row) => (isEpisode(row) ? row[RESPONSE].map(([, text]) => text).join("\n") : row[RESPONSE]);

class Samples {
  constructor(parent) {
    this.page = 0;
    this.sort = { column: 0, up: true };
    this.find = element("input", { type: "search", id: "find", placeholder: "find in prompt or response", "aria-label": "find in prompt or response" });
    this.epoch = this.choice("epoch", "all rollouts", [...new Set(data.samples.rows.map((r) => r[EPOCH]))], (e) => `rollout ${e}`);
    this.finish = this.choice("finish", "any finish", [...new Set(data.samples.rows.map((r) => r[FINISH]))].filter(Boolean), String);
    this.least = element("input", { type: "number", id: "least", step: "any", "aria-label": "least reward" });
    this.most = element("input", { type: "number", id: "most", step: "any", "aria-label": "largest reward" });
    this.order = this.choice("order", null, SAMPLE_COLUMNS.map((_, k) => k), (k) => `sort by ${SAMPLE_COLUMNS[k].label}`);
    this.order.addEventListener("change", () => this.sortBy(Number(this.order.value), true));
    for (const input of [this.find, this.epoch, this.finish, this.least, this.most]) input.addEventListener("input", () => this.refresh());
    this.direction = element("button", { type: "button", id: "direction", onclick: () => this.sortBy(this.sort.column, !this.sort.up) });
    this.body = element("tbody");
    this.head = element("tr");
    this.count = element("span", { id: "count" });
    this.back = element("button", { type: "button", onclick: () => this.turn(-1) }, "◀");
    this.forth = element("button", { type: "button", id: "next", onclick: () => this.turn(1) }, "▶");
    parent.append(
      element("p", { class: "muted small" }, this.note()),
      element("div", { class: "card wide" },
        element("div", { class: "controls" }, this.find, this.epoch, this.finish,
          element("span", {}, "reward ", this.least, " to ", this.most), this.order, this.direction),
        element("div", { class: "scroll" }, element("table", { id: "rows" }, element("thead", {}, this.head), this.body)),
        element("div", { class: "pager" }, this.count, this.back, this.forth)));
    this.refresh();
  }

  choice(id, all, values, label) {
    return element("select", { id, "aria-label": id }, all === null ? [] : element("option", { value: "" }, all),
      values.map((v) => element("option", { value: v }, label(v))));
  }

  note() {
    const { rows, total, rollouts, rollouts_shown: shown } = data.samples;
    const which = rows.length < total
      ? `${rows.length.toLocaleString("en")} of ${total.toLocaleString("en")} samples: complete groups from ${shown} of ${rollouts} rollouts, evenly spread (report --samples sets how many).`
      : `All ${total.toLocaleString("en")} samples of ${rollouts} rollout${rollouts > 1 ? "s" : ""}.`;
    return `${which} Select a row to read it in full.`;
  }

  sortBy(column, up) {
    this.sort = { column, up };
    this.refresh();
  }

  turn(pages) {
    this.page += pages;
    this.draw();
  }

  refresh() {
    const wanted = this.find.value.toLowerCase();
    const [least, most] = [this.least, this.most].map((input) => (input.value === "" ? null : Number(input.value)));
    this.shown = data.samples.rows.filter((r) =>
      (this.epoch.value === "" || r[EPOCH] === Number(this.epoch.value)) &&
      (this.finish.value === "" || r[FINISH] === this.finish.value) &&
      (least === null || r[REWARD] >= least) && (most === null || r[REWARD] <= most) &&
      (!wanted || promptOf(r).toLowerCase().includes(wanted) || responseOf(r).toLowerCase().includes(wanted)));
    const { key } = SAMPLE_COLUMNS[this.sort.column];
    const sign = this.sort.up ? 1 : -1;
    // Rows without a value come last in both directions.
    this.shown.sort((a, b) => {
      const [x, y] = [key(a) ?? null, key(b) ?? null];
      if (x === null || y === null) return (x === null) - (y === null);
      return x < y ? -sign : x > y ? sign : 0;
    });
    this.page = 0;
    this.draw();
  }

  draw() {
    const pages = Math.max(1, Math.ceil(this.shown.length / PAGE));
    this.page = Math.min(Math.max(this.page, 0), pages - 1);
    const start = this.page * PAGE;
    const part = this.shown.slice(start, start + PAGE);
    this.head.replaceChildren(...SAMPLE_COLUMNS.map((c, k) => {
      const mark = this.sort.column === k ? (this.sort.up ? " ▲" : " ▼") : "";
      const flip = () => this.sortBy(k, this.sort.column === k ? !this.sort.up : !c.num);
      return element("th", { class: c.num ? "num" : null, title: c.hint }, element("button", { type: "button", "data-sort": c.label, onclick: flip }, c.label + mark));
    }));
    this.order.value = this.sort.column;
    this.direction.textContent = this.sort.up ? "▲ up" : "▼ down";
    this.body.replaceChildren(...part.map((r) => this.row(r)));
    if (!part.length) this.body.append(element("tr", {}, element("td", { colspan: SAMPLE_COLUMNS.length, class: "muted text" }, "No sample fits the filter.")));
    this.count.textContent = part.length ? `${start + 1}–${start + part.length} of ${this.shown.length.toLocaleString("en")}` : "";
    this.back.disabled = this.page === 0;
    this.forth.disabled = this.page >= pages - 1;
  }

  row(r) {
    const row = element("tr", { "data-id": `${r[EPOCH]}.${r[GROUP]}.${r[MEMBER]}`, tabindex: 0, onclick: () => {
      // Selecting text in an open row must not close the row.
      if (!String(getSelection())) row.classList.toggle("open");
    }, onkeydown: (event) => event.key === "Enter" && row.classList.toggle("open") },
    SAMPLE_COLUMNS.map((c) => this.cell(r, c)));
    return row;
  }

  cell(r, column) {
    if (!column.text) {
      return element("td", { class: column.num ? "num" : null, "data-label": column.label }, column.num ? number(column.key(r)) : column.show(r));
    }
    const value = column.key(r);
    const shown = column.label === "response" && isEpisode(r) ? r[RESPONSE].map((m) => this.message(m)) : value;
    const content = shown === "" ? element("span", { class: "muted" }, "(empty)") : element("div", { class: "clip" }, shown);
    return element("td", { class: "text", "data-label": column.label }, content, column.label === "response" ? this.parts(r) : null);
  }

  message([who, text, sampled, trained, reward, seconds, depth]) {
    const turn = sampled !== null;
    const mask = who === "branch" ? "" : turn ? `${number(sampled)} token${sampled === 1 ? "" : "s"}, ${trained === sampled ? "" : `${number(trained)} `}trained` : "not trained";
    const measured = [turn && `reward ${number(reward)}`, seconds !== null && `${number(seconds)} s`];
    return element("div", { class: turn ? "message turn" : "message", style: depth ? `margin-left: ${Math.min(depth, 8)}em` : null },
      who && element("div", { class: "who" }, [who, mask, ...measured].filter(Boolean).join(" · ")), text);
  }

  parts(r) {
    const { graders } = data.samples;
    if (!r[PARTS].length) return null;
    return element("div", { class: "extra" }, r[PARTS].map((p, k) => `${graders[k] ?? `grader ${k}`}: ${number(p)}`).join(" · "));
  }
}

function drawSamples() {
  if (!data.samples.rows.length) {
    byId("samples-body").append(element("p", { class: "muted" },
      `No dumps of rollouts were found in ${data.samples.places.join(", ")}. A run with --rl-dump-dir writes them; report --dump-dir names their folder.`));
    return;
  }
  new Samples(byId("samples-body"));
}

// Greedy responses to the same held-out prompts, at the first and the last evaluation.
function drawHeldOut() {
  const { iterations, rows } = data.held_out;
  if (!rows.length) {
    byId("held-out-body").append(element("p", { class: "muted" }, "The run directory has no responses to held-out prompts; a run with --rl-eval-data writes them."));
    return;
  }
  const cell = (text) => element("td", { class: "text" }, element("div", { class: "clip" }, text || "(empty)"));
  const heads = iterations.flatMap((i) => [`after ${i} iterations`, "reward"]);
  const body = rows.map(([prompt, answer, responses]) => element("tr", { onclick: (event) => event.currentTarget.classList.toggle("open") },
    cell(prompt), cell(answer), responses.flatMap(([text, reward]) => [cell(text), element("td", { class: "num" }, number(reward))])));
  byId("held-out-body").append(element("p", { class: "muted small" }, "Greedy responses to the first held-out prompts."),
    element("div", { class: "card wide scroll" }, element("table", { id: "held-out-rows", class: "texts" },
      element("thead", {}, element("tr", {}, ["prompt", "answer", ...heads].map((h) => element("th", {}, h)))), element("tbody", {}, body))));
}

function drawSettings() {
  for (const [heading, values] of data.settings) {
    byId("settings-body").append(element("div", { class: "card" }, element("h3", {}, heading), element("div", { class: "scroll" },
      element("table", { class: "settings" }, Object.entries(values).map(([k, v]) => element("tr", {}, element("td", {}, k), element("td", {}, v)))))));
  }
}

drawHeldOut();
drawSamples();
drawSettings();
