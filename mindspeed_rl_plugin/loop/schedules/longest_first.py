"""The order of prompts for engines: those with long earlier responses come first, so that no long response runs alone
at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindspeed_rl_plugin.rows import Group, Prompt


class LongestFirst:
    """Sorts the prompts of an epoch by the mean length of their earlier responses, longest first. A prompt without
    earlier responses counts as the mean of all; so does a prompt from another program, since it does not come again.

    step: complete groups of an optimizer step. Prompts only move within a step, so every step keeps its prompts.
    """

    def __init__(self, step: int) -> None:
        self.step = max(step, 1)  # a group may be larger than a step
        self._rows: dict[Group, tuple[int, int]] = {}  # unfinished group -> row of the data, tokens of the prompt
        self._lengths: dict[int, float] = {}  # row of the data -> mean tokens of a response

    def order(self, epoch: int, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts of an epoch, sorted: prompt i of the result becomes group i."""
        usual = sum(self._lengths.values()) / max(len(self._lengths), 1)
        ordered: list[Prompt] = []
        for first in range(0, len(prompts), self.step):
            part = prompts[first : first + self.step]
            ordered += sorted(part, key=lambda prompt: -self._lengths.get(prompt.row, usual))
        self._rows |= {(epoch, group): (p.row, len(p.tokens)) for group, p in enumerate(ordered)}
        return ordered

    def finished(self, lengths: Mapping[Group, Sequence[int]]) -> None:
        """Learn from sampled groups. lengths: tokens of their rows, with the prompts."""
        for group, of_rows in lengths.items():
            row, prompt = self._rows.pop(group, (-1, 0))  # row below 0: ordered before a resume, or offered
            if row >= 0 and of_rows:
                self._lengths[row] = sum(of_rows) / len(of_rows) - prompt
