"""What the episodes of a rollout tell about themselves, and which of them no run should go on with."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_rl_plugin.environment import say
from mindspeed_rl_plugin.episodes.protocol import EpisodeError
from mindspeed_rl_plugin.rows import EPISODE_COUNTS, FINISH, Rows

FAILING = 16  # episodes in which every call of a tool raised, so that it is the tool that does not work


def episode_metrics(rows: Rows) -> dict[str, float]:
    """Metrics of B episodes, named as in `names.py`."""
    count, turns = len(rows), rows["turns"].lengths.double()
    totals = dict(zip(EPISODE_COUNTS, rows["episode_counts"].sum(0).tolist(), strict=True))
    return {
        "episode/turns_mean": float(turns.mean()),
        "episode/turns_max": float(turns.max()),
        "episode/turn_limit": float((rows["finish"] == FINISH.index("turns")).double().mean()),
        "episode/observation_tokens": totals["observation_tokens"] / count,
        "episode/cut": float(totals["cut"]),
        "episode/special": float(totals["special"]),
        "episode/seconds": totals["milliseconds"] / 1000 / count,
        "episode/failed": float(rows["environment_failed"].sum()),
        "tools/calls": totals["calls"] / count,
        **{f"tools/{name}": float(totals[name]) for name in ("malformed", "unknown", "arguments", "raised")},
    }


def check_environments(rows: Rows) -> None:
    """Raises EpisodeError where the environment failed in all episodes: no reward of it is real."""
    if rows["environment_failed"].all():
        raise EpisodeError(
            f"the environment failed in all {len(rows)} episodes of this rollout; its first failure is printed above, "
            "where it came: mend the environment"
        )


def check_tools(rows: Rows, names: Sequence[str], failing: dict[str, int], warn: bool = True) -> bool:
    """Whether a call was found; where none was, a warning. names: of the tools; failing: tool -> episodes that called
    it since one of its calls was answered, kept from rollout to rollout. Raises EpisodeError where these are FAILING: a
    single one may be the model's doing."""
    for name, calls in zip(names, rows["tool_calls"].unbind(1), strict=True):
        made, raised = calls.unbind(1)
        works = bool((raised < made).any())
        failing[name] = 0 if works else failing.get(name, 0) + int((made > 0).sum())
        if failing[name] >= FAILING:
            raise EpisodeError(
                f"the tool {name!r} raised in every call of the last {failing[name]} episodes that called it; its "
                "first error is printed above, where it came: mend the tool"
            )
    kinds = [EPISODE_COUNTS.index(name) for name in ("calls", "malformed", "unknown", "arguments")]
    found = bool(rows["episode_counts"][:, kinds].any())
    if warn and not found:
        say(
            f"warning: the model called no tool in any of the {len(rows)} episodes of this rollout. If it should have, "
            "look at a response (--rl-dump-dir): --rl-tool-parser may not be that of this model"
        )
    return found
