"""What a user would launch, with a stand-in for fused attention over context parallel ranks, which no CPU runs."""

import runpy
from pathlib import Path

from gathered_attention import gathered_attention

if __name__ == "__main__":
    with gathered_attention():
        runpy.run_path(str(Path(__file__).parents[2] / "examples" / "pretrain_gpt.py"), run_name="__main__")
