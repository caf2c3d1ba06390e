"""docs/metrics.md holds the register of names, the console's words and the summary's keys.

python tests/monitor/test_metrics_doc.py        writes its list of names again, from monitor/names.py
"""

import re
from pathlib import Path

from mindspeed_rl_plugin.monitor.console import SHORT_STAGES
from mindspeed_rl_plugin.monitor.names import METRICS, meaning
from mindspeed_rl_plugin.monitor.run_summary import summarize

DOC = Path(__file__).parents[2] / "docs" / "metrics.md"
FAMILIES = {"seconds/STAGE": "seconds/x", "peak_bytes/STAGE": "peak_bytes/x", "eval/pass@K": "eval/pass@8"}
FAMILIES |= {"reward/mean/GRADER": "reward/mean/exact"}
LIST = re.compile(r"(?<=<!-- from monitor/names.py -->\n).*?(?=<!-- end -->)", re.DOTALL)


def listed():
    rows = {**dict.fromkeys(METRICS), **FAMILIES}
    lines = []
    for name, example in rows.items():
        unit, text = meaning(example or name)
        shown = f" ({unit})" if unit and unit not in text.split() else ""
        lines.append(f"- `{name}`: {text}{shown}")
    return "\n".join(lines) + "\n"


def test_the_list_is_the_register():
    assert LIST.search(DOC.read_text())[0] == listed(), f"run python {Path(__file__).name}"


def test_stages_and_summary_are_explained(run_builder, tmp_path):
    text = DOC.read_text()
    keys = summarize(run_builder(tmp_path / "run", iterations=2, dumps=False))
    assert [key for key in keys if f"| `{key}` |" not in text] == []
    assert [stage for stage, short in SHORT_STAGES.items() if f"| `{stage}` | `{short}` |" not in text] == []


if __name__ == "__main__":
    DOC.write_text(LIST.sub(lambda _: listed(), DOC.read_text()))
