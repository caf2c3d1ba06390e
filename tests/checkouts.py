"""Upstream's checkouts, as MEGATRON_LM_PATH, MINDSPEED_PATH and MINDSPEED_LLM_PATH name them, several with colons."""

import os
from pathlib import Path

import pytest

from mindspeed_rl_plugin.tools.patch import core_version


def checkouts(variable: str = "MEGATRON_LM_PATH") -> list[Path]:
    return [Path(path) for path in os.environ.get(variable, "").split(os.pathsep) if path]


def cores() -> dict[str, Path]:
    """Core version (major.minor) -> checkout of Megatron-LM."""
    return {".".join(map(str, core_version(path)[:2])): path for path in checkouts()}


def under_mindspeed() -> tuple[Path, str]:
    """The checkout of core 0.12, and a PYTHONPATH of it and MindSpeed; skips a test where one is absent."""
    if "0.12" not in cores() or "MINDSPEED_PATH" not in os.environ:
        pytest.skip("no checkout of core 0.12 in MEGATRON_LM_PATH, or no MINDSPEED_PATH")
    return cores()["0.12"], f"{cores()['0.12']}:{os.environ['MINDSPEED_PATH']}"
