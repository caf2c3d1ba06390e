"""An episode as its pool knows it: the reply in the making, and what is left to do for it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from mindspeed_rl_plugin.episodes.dispatch import Call, Home
from mindspeed_rl_plugin.episodes.protocol import Message, Turn
from mindspeed_rl_plugin.rows import SampleId


@dataclass
class Draft:
    """A reply in the making. left: messages, and calls from which some come, in their order."""

    left: deque[Message | tuple] = field(default_factory=deque)
    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False
    calls: dict[str, tuple[int, int]] = field(default_factory=dict)
    raised: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def said(self, name: str, content: str) -> None:
        self.messages.append({"role": "tool", "name": name, "content": content})


@dataclass(eq=False)
class OpenEpisode:
    """An episode. home: its environment, None where there are only tools; turn: the last one, whose calls a user's
    parser finds; call: in the making."""

    id: SampleId
    home: Home | None
    turn: Turn | None = None
    draft: Draft = field(default_factory=Draft)
    call: Call | None = None
