"""The example of docs/dock.md runs."""

import re
from pathlib import Path


def test_the_documented_example_runs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "dock.md").read_text()
    exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0], {})
