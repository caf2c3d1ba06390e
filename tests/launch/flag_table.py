"""The verdict on each flag of Megatron-LM, MindSpeed and MindSpeed-LLM: docs/upstream-flags.toml, and what the package
itself knows of them."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import tomllib

from mindspeed_rl_plugin.checks.refused_flags import UPSTREAM
from mindspeed_rl_plugin.checks.taken_over import BATCH_SCHEDULES, IN_SAMPLES, LORA_OF_LLM, TAKEN_OVER, UNTESTED

TABLE = tomllib.loads((Path(__file__).parents[2] / "docs" / "upstream-flags.toml").read_text())
SUPPORTED, NEUTRAL, NEUTRAL_GROUPS = TABLE["supported"], TABLE["neutral"], TABLE["neutral_groups"]
# These have lines of their own, where the start is decided.
ANSWERED = "--finetune --no-load-optim --no-load-rng --load --no-save-optim --no-save-rng"


@cache
def rows() -> dict[str, tuple[str, str]]:
    """Flag or pattern -> verdict and reason. A flag counts before a pattern, and of patterns the first that fits."""
    taken = {**TAKEN_OVER, "decided at the start": " ".join((ANSWERED, *IN_SAMPLES, *BATCH_SCHEDULES, *LORA_OF_LLM))}
    tables = {"taken over": taken, "supported": SUPPORTED, "refused": TABLE["checked"], "neutral": NEUTRAL}
    tables["untested"] = {"nothing shows it under RL": UNTESTED}
    out: dict[str, tuple[str, str]] = {}
    for kind, table in tables.items():
        for reason, flags in table.items():
            for flag in flags.split():
                out.setdefault(flag.partition("=")[0], (kind, reason))
    return out


def verdict(flags: Sequence[str], attribute: str, group: str | None) -> tuple[str, str] | None:
    """Verdict and reason of an argument of upstream's parser; None where the table has none.

    flags: how it is spelt; group: title of its group. What is supported or taken over may be refused with other values.
    """
    table, refused = rows(), next((row for row in UPSTREAM if row.name == attribute), None)
    pattern = next((p for p in (*flags, *table) if p in table and any(fnmatchcase(flag, p) for flag in flags)), None)
    if refused and (pattern is None or table[pattern][0] not in ("taken over", "supported")):
        return "refused", refused.why
    if pattern:
        return table[pattern]
    return next((("neutral", why) for why, titles in NEUTRAL_GROUPS.items() if group in titles), None)
