"""What rows of episodes have besides those of other responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mindspeed_rl_plugin.rows import EPISODE_COUNTS, Column, Ragged, pack_json


def episode_row(
    prompt: Sequence[int],
    asked: Sequence[int],
    turns: Sequence[tuple[int, int]],
    rewards: Sequence[float],
    conversation: Sequence[Mapping[str, object]],
    *,
    counts: Mapping[str, int],
    tools: Sequence[Sequence[int]],
    failed: bool,
) -> dict[str, Column]:
    """The columns of one episode, B = 1.

    prompt: token ids before the first turn; asked: of the data's prompt; turns: (first, end) of each, in response
    tokens; rewards: the environment's, one for each turn; conversation: chat messages (JSON values), with the
    environment's last reply, which the model never sees; turns of the model have `turn` [tokens] and `reward`, and
    `seconds`, the time of the environment's reply, are at the first message of the reply, or, where it has no message,
    at the one before; counts: of `EPISODE_COUNTS`; tools: of each its calls, and how many of them raised.
    """
    columns: dict[str, Column] = {
        "prompt_length": torch.tensor([len(prompt)]),
        "environment_began": torch.tensor([tuple(prompt) != tuple(asked)], dtype=torch.int8),
        "turns": Ragged.from_rows([torch.tensor(turns, dtype=torch.int64).reshape(-1, 2) + len(prompt)]),
        "turn_reward": Ragged.from_rows([torch.tensor(rewards, dtype=torch.float32)]),
        "conversation": pack_json([list(conversation)]),
        "environment_failed": torch.tensor([failed], dtype=torch.int8),
        "episode_counts": torch.tensor([[counts[name] for name in EPISODE_COUNTS]]),
    }
    return columns | ({"tool_calls": torch.tensor([[list(calls) for calls in tools]])} if tools else {})
