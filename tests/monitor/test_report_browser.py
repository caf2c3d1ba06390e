"""The report in a real browser: headless Chromium runs its scripts, the page is checked against the run."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from mindspeed_rl_plugin.monitor.run_files import event_files, read_events, read_jsonl, read_metrics
from mindspeed_rl_plugin.tools.report.report import main

VOID = {"meta", "input", "br", "link", "img", "hr"}
CHROMIUM = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--window-size=1200,1000", "--virtual-time-budget=3000",
)  # fmt: skip


class Page(HTMLParser):
    """The elements of a page in order, each (tag, attributes, text of itself and what is in it)."""

    def __init__(self, text):
        super().__init__()
        self.elements, self._open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes), []))
        if tag not in VOID:
            self._open.append(self.elements[-1])

    def handle_endtag(self, tag):
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, text):
        for element in self._open:
            element[2].append(text)

    def all(self, tag, **attributes):
        """(attributes, text) of every element of that kind; `data_x` stands for data-x, `class_` for a class it has."""
        wanted = {k.replace("_", "-"): v for k, v in attributes.items() if k != "class_"}
        has = attributes.get("class_")

        def fits(a):
            return wanted.items() <= a.items() and (not has or has in a.get("class", "").split())

        return [(a, "".join(text)) for t, a, text in self.elements if t == tag and fits(a)]


def open_in_browser(path, tmp_path, script=""):
    """The page as it stands after its scripts, and then `script`, have run."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.fail("the report's tests open it in Chromium, which is not here: apt-get install chromium")
    if script:
        text = path.read_text(encoding="utf-8").replace("</body>", f"<script>{script}</script></body>")
        path = tmp_path / "driven.html"
        path.write_text(text, encoding="utf-8")
    command = [chromium, *CHROMIUM, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, timeout=90, check=True)
    return Page(done.stdout.decode("utf-8"))


def vertices(path):
    return [tuple(map(float, p)) for p in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path)]


def check_curve(page, rows, name):
    """The curve has one vertex per value, further right with every iteration, as high as the value (linear axes)."""
    curves = page.all("path", class_="line", data_series=name)
    points = [(r["iteration"], r[name]) for r in rows if r.get(name) is not None]
    assert len(curves) == 1 and points, f"{name}: {len(curves)} curves for {len(points)} values"
    shown = vertices(curves[0][0]["d"])
    assert len(shown) == len(points), f"{name}: {len(shown)} vertices for {len(points)} values"
    low, high = (f(range(len(points)), key=lambda k: points[k][1]) for f in (min, max))
    slope = (shown[high][1] - shown[low][1]) / ((points[high][1] - points[low][1]) or 1)
    assert slope < 0 or points[high][1] == points[low][1], f"{name} is upside down"
    for (x, y), (iteration, value), left in zip(shown, points, [(-1, 0), *shown], strict=False):
        assert x > left[0], f"{name}: iteration {iteration} is not right of the one before"
        assert abs(shown[low][1] + slope * (value - points[low][1]) - y) < 0.05, f"{name} at {iteration}"


@pytest.fixture(scope="module")
def full_run(tmp_path_factory, run_builder):
    folder = tmp_path_factory.mktemp("full")
    about = run_builder(folder / "run", iterations=30) / "run.json"
    known = {"held_out": 400, "starts": [{"iteration": i, "time": 0.0} for i in (0, 5)]}
    about.write_text(json.dumps(json.loads(about.read_text()) | known))
    assert main([str(folder / "run"), "--out", str(folder / "r.html"), "--samples", "400"]) == 0
    return folder


@pytest.fixture(scope="module")
def full_page(full_run):
    return open_in_browser(full_run / "r.html", full_run)


def test_the_page_needs_no_network(full_run):
    text = (full_run / "r.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    outside = set(re.findall(r"https?://[^\"'\s<]+", text)) - {"http://www.w3.org/2000/svg"}
    assert not outside and not re.search(r"<(script|link|img)[^>]+(src|href)=", text)


@pytest.mark.browser
def test_curves_are_drawn_from_the_metrics(full_run, full_page):
    rows = read_metrics(full_run / "run")
    for name in (
        "reward/mean", "eval/accuracy", "eval/reward_mean", "eval/pass@8", "kl/ref", "entropy", "response/length_mean",
        "clip_fraction", "tokens_per_second", "loss", "groups/informative",
    ):  # fmt: skip
        check_curve(full_page, rows, name)
    assert len(vertices(full_page.all("path", data_series="logp_diff/max")[0][0]["d"])) == 30
    titles = {a["data-chart"] for a, _ in full_page.all("div") if "data-chart" in a}
    assert "Reward" in titles and not titles & CHARTS_APART.keys(), "of engines apart there is nothing to draw"


CHARTS_APART = {  # beside "KL", which every run has
    "Idle time": ("idle/trainers_starved", "idle/engines_back_pressure", "idle/engines_version"),
    "Lag": ("lag/mean", "lag/token_mean", "lag/max"),
    "Segments of a response": ("segments/mean",),
    "Lengths, generated and trained": ("engines/length_mean",),
    "Weights to engines": ("seconds/publish", "weights/pull_seconds", "weights/pause_seconds"),
}


@pytest.mark.browser
def test_engines_apart_are_drawn_below_the_ranks_and_have_charts(tmp_path, run_builder):
    run_builder(tmp_path / "run", iterations=3, apart=True)
    assert main([str(tmp_path / "run"), "--out", str(tmp_path / "r.html")]) == 0
    page = open_in_browser(tmp_path / "r.html", tmp_path)
    bars = [a for a, _ in page.all("rect", class_="span") if "data-process" in a]
    kinds = ["generate", "pull", "back-pressure"]
    assert [b["data-kind"] for b in bars if b["data-process"] == "generator rank 4"] == kinds * 3 and len(bars) == 18
    generate, pull, idle = bars[:3]
    assert float(pull["y"]) > float(generate["y"]) == float(idle["y"]), "what runs at the same time has its own lane"
    marks = [a for a, _ in page.all("line", class_="published")]
    assert [m["data-version"] for m in marks] == ["5"] * 3
    assert float(generate["x"]) < float(marks[0]["x1"]) < float(pull["x"]) < float(idle["x"])
    lowest = max(float(a["y"]) for a, _ in page.all("rect", class_="span") if "data-rank" in a)
    assert min(float(b["y"]) for b in bars) > lowest
    rows = read_metrics(tmp_path / "run")
    for title, names in CHARTS_APART.items():
        assert len(page.all("div", data_chart=title)) == 1
        for name in names:
            check_curve(page, rows, name)
    (kl,) = page.all("div", data_chart="KL")
    assert "policy in the engine, which sampled the rollout, to the policy at the start" in kl[1]
    check_curve(page, rows, "rollout/kl")
    assert {"generator rank 4", "joined engine 1"} <= {text for _, text in page.all("text")}


@pytest.mark.browser
def test_the_share_of_other_experts_is_drawn_by_layer(tmp_path, run_builder):
    """One chart, in which each of more layers than there are colours has a line with one of them."""
    names = ["router/differ", *(f"router/differ/{layer}" for layer in range(2, 14))]
    path = run_builder(tmp_path / "run", iterations=3) / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    shares = [{n: 0.01 * k + 0.001 * line["iteration"] for k, n in enumerate(names)} for line in lines]
    path.write_text("".join(json.dumps(line | more) + "\n" for line, more in zip(lines, shares, strict=True)))
    rows = read_metrics(tmp_path / "run")
    assert main([str(tmp_path / "run"), "--out", str(tmp_path / "r.html")]) == 0
    page, css = open_in_browser(tmp_path / "r.html", tmp_path), (tmp_path / "r.html").read_text()
    for name in names:
        check_curve(page, rows, name)
        assert f"--{page.all('path', data_series=name)[0][0]['stroke'][6:-1]}:" in css
    charts = [a["data-chart"] for a, text in page.all("div") if "router/differ/13" in text and "data-chart" in a]
    assert charts == ["Other experts"]


@pytest.mark.browser
def test_samples_are_drawn_as_text_hostile_ones_too(full_run, full_page):
    rows = [dict(a) for a, _ in full_page.all("tr") if "data-id" in a]
    assert len(rows) == 25 and rows[0]["data-id"] == "0.0.0"
    texts = dict((a["data-id"], t) for a, t in full_page.all("tr") if "data-id" in a)
    assert "</script><script>document.title='taken'</script><!-- <b>bold</b> &" in texts["0.0.0"]
    assert "What is" in texts["0.0.1"] and "Answer: " in texts["0.0.3"]
    assert full_page.all("title")[0][1] == "run · RL report"
    assert not full_page.all("b", class_="bold") and "of 960 samples" in full_page.all("section", id="samples")[0][1]


@pytest.mark.browser
def test_settings_verdict_resumes_and_held_out_responses_are_shown(full_page):
    (_, said), (_, below) = *full_page.all("p", id="verdict"), *full_page.all("p", id="subtitle")
    assert said.startswith("Learned: accuracy on 400 held-out prompts rose by ")
    assert "resumed at iteration 5 " in below and "memory" not in below and full_page.all("line", class_="resumed")
    settings = "".join(text for _, text in full_page.all("table", class_="settings"))
    assert "--rl-rewardmath exact" in settings and "torch2.x" in settings
    rows = [text for _, text in full_page.all("tr") if text.startswith("2+2=")]
    assert rows == ["2+2=44 (0)14 (30)1"]
    assert "</script><script>" in full_page.all("table", id="held-out-rows")[0][1]


@pytest.mark.browser
def test_an_episode_is_drawn_turn_by_turn_as_text(episode_dump, run_builder, tmp_path):
    run = run_builder(tmp_path / "run", iterations=1, ranks=1, evaluate=False, dumps=False)
    assert main([str(run), "--dump-dir", str(episode_dump)]) == 0
    page = open_in_browser(
        run / "report.html", tmp_path, "byId('find').value = '0+0'; byId('find').dispatchEvent(new Event('input'));"
    )
    assert [a["data-id"] for a, _ in page.all("tr") if "data-id" in a] == ["0.0.0", "0.1.0"]
    messages = page.all("div", class_="message")
    tokens = json.loads(page.all("script", id="data")[0][1])["samples"]["rows"][0][4][4][2]
    assert [text.split("\u2028")[0] for _, text in messages[:6]] == [
        "start · not trained · 0.25 s",
        "assistant · 8 tokens, trained · reward 0<call>",
        "add · not trained · 0.125 s</script><script>document.title='taken'</script><!-- <b>bold</b> & ",
        "user · not trainedgo on",
        f"assistant · {tokens} tokens, trained · reward 0Answer: 0",
        "user · not trained · 1.5 sright",
    ]
    assert ["turn" in a["class"].split() for a, _ in messages] == [False, True, False, False, True, False, True]
    assert ", 0 trained · reward 0.25 · 0.75 sAnswer: 1" in messages[6][1]
    assert page.all("title")[0][1] == "run · RL report"


@pytest.mark.browser
def test_the_timeline_and_stage_times_are_drawn(full_run, full_page):
    events = [e for e in read_events(full_run / "run") if 28 <= e["iteration"] <= 30]
    bars = [a for a, _ in full_page.all("rect", class_="span")]
    assert len(bars) == len(events)
    for rank in (0, 1):
        mine = [b for b in bars if b["data-rank"] == str(rank)]
        want = sorted((e for e in events if e["rank"] == rank), key=lambda e: e["start"])
        assert [b["data-stage"] for b in mine] == [e["stage"] for e in want]
        scale = [(float(b["x"]), e["start"]) for b, e in zip(mine, want, strict=True)]
        pixels = (scale[-1][0] - scale[0][0]) / (scale[-1][1] - scale[0][1])
        assert all(abs(scale[0][0] + (t - scale[0][1]) * pixels - x) < 0.1 for x, t in scale)
    assert len(full_page.all("rect", class_="part", data_stage="generate")) == 30
    assert len(vertices(full_page.all("path", data_series="peak/update")[0][0]["d"])) == 30
    memory = full_page.all("div", data_chart="Memory of each stage")[0][1]
    assert "on the rank that used most: memory of the builder." in memory, "the page says what the run's meter measured"
    assert "generate" in full_page.all("table", id="stage-table")[0][1]


@pytest.mark.browser
def test_gaps_of_a_curve_and_an_hour_in_which_the_job_was_down(run_builder, tmp_path):
    """A metric of some iterations is one line, one that was not finite has a gap; the hour does not hide the rest."""
    run = run_builder(tmp_path / "run", iterations=12, ranks=1, evaluate=False, dumps=False)
    rows = read_jsonl(run / "metrics.jsonl")
    for row in rows:
        if row["iteration"] % 4 != 1:  # a rollout serves four iterations and is measured once
            del row["reward/mean"], row["reward/std"]
        if row["iteration"] in (5, 6):
            row["loss"] = None
    events = read_events(run)
    for e in events:
        late = 3600 * (e["iteration"] == 12)
        e |= {"start": e["start"] + late, "end": e["end"] + late}
    for path, lines in ((run / "metrics.jsonl", rows), (event_files(run)[0], events)):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main([str(run)]) == 0
    page = open_in_browser(run / "report.html", tmp_path)
    check_curve(page, rows, "reward/mean")
    check_curve(page, rows, "loss")
    pens = {n: page.all("path", data_series=n)[0][0]["d"].count("M") for n in ("reward/mean", "loss")}
    assert pens == {"reward/mean": 1, "loss": 2}
    assert len(vertices(page.all("path", class_="band")[0][0]["d"])) == 6
    width = {a["data-iteration"]: float(a["width"]) for a, _ in page.all("rect", class_="span", data_stage="generate")}
    assert len(width) == 3 and min(width.values()) > 80
    right = [float(a["x"]) + float(a["width"]) for a, _ in page.all("rect", class_="span")]
    assert right == sorted(right) and right[-1] < 1200
    assert "60 min idle" in page.all("div", id="timeline")[0][1]


DRIVE = """
  const click = (s) => document.querySelector(s).click();
  const set = (id, value, type) => { const e = byId(id); e.value = value; e.dispatchEvent(new Event(type)); };
  click('[data-sort="reward"]');
  set('find', 'What is', 'input'); set('least', '1', 'input'); set('epoch', '2', 'input');
  click('#rows tbody tr');
  set('from', '3', 'change'); set('to', '4', 'change');
  click('#as-share'); click('#smooth');
  document.querySelector('#more').open = true;
  const plot = document.querySelector('[data-chart="Reward"] svg'), box = plot.getBoundingClientRect();
  const middle = box.left + 54 + (box.width - 64) / 2;
  plot.dispatchEvent(new PointerEvent('pointermove', {clientX: middle, clientY: box.top + 20}));
  const bar = document.querySelector('rect.span[data-stage="update"]');
  bar.dispatchEvent(new PointerEvent('pointermove', {clientX: 300, clientY: 300}));
  click('#theme');
"""


@pytest.mark.browser
def test_filters_sorting_hover_and_switches_work(full_run, tmp_path):
    page = open_in_browser(full_run / "r.html", tmp_path, DRIVE)
    rows = [(a, t) for a, t in page.all("tr") if "data-id" in a]
    samples = json.loads(page.all("script", id="data")[0][1])["samples"]["rows"]
    want = [r for r in samples if r[0] == 2 and r[6] >= 1]
    assert len(rows) == min(25, len(want)) > 0 and all(a["data-id"].startswith("2.") for a, _ in rows)
    assert "open" in rows[0][0]["class"]
    assert {a["data-iteration"] for a, _ in page.all("rect", class_="span")} == {"3", "4"}
    assert "update" in page.all("div", id="tip")[0][1] and "peak" in page.all("div", id="tip")[0][1]
    reward = page.all("div", data_chart="Reward")[0][1]
    assert "iteration 15" in reward
    assert page.all("path", class_="raw") and page.all("html")[0][0]["data-theme"] == "dark"
    accuracy = page.all("div", data_chart="Held-out accuracy")[0][1]
    at_ten = next(r for r in read_metrics(full_run / "run") if r["iteration"] == 10)["eval/accuracy"]
    assert f"{at_ten:.4g}" in accuracy, "between evaluations the latest one is shown"


@pytest.mark.browser
def test_what_is_missing_is_said_in_words(run_builder, tmp_path):
    run = run_builder(tmp_path / "run", iterations=2, ranks=1, evaluate=False, dumps=False, events=False)
    rows = read_jsonl(run / "metrics.jsonl")
    lean = [{k: v for k, v in r.items() if not k.startswith(("kl/", "entropy"))} for r in rows]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lean))
    assert main([str(run)]) == 0 and not event_files(run)
    page = open_in_browser(run / "report.html", tmp_path)
    assert "--rl-eval-data turns evaluation on" in page.all("div", data_chart="Held-out accuracy")[0][1]
    assert "No KL was measured" in page.all("div", data_chart="KL")[0][1]
    assert "Not in this run's metrics" in page.all("div", data_chart="Entropy")[0][1]
    assert "The run directory has no stage events" in page.all("section", id="stages")[0][1]
    assert "A run with --rl-dump-dir writes them" in page.all("section", id="samples")[0][1]
    check_curve(page, lean, "reward/mean")
