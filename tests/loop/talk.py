"""An environment that answers anything, and a tool, for a model that was never trained."""

import os
import time


class Talk:
    """Says a number after each turn, and is over after five. Rewards differ from turn to turn."""

    def reset(self, prompt: str, seed: int) -> None:
        self.prompt, self.turns = prompt, seed % 2

    def step(self, text: str):
        self.turns += 1
        return f"[{self.turns}]", sum(map(ord, text)) % 5 / 4, self.turns >= 5


class Verbose(Talk):
    """Says more than the engine's prefix cache has in a block."""

    def step(self, text: str):
        said, reward, done = super().step(text)
        return said * 50, reward, done


class Fails(Talk):
    """Some of its episodes fail in the second turn, each in another way."""

    def step(self, text: str):
        if self.turns == 2:
            kind = sum(map(ord, text)) % 4
            if kind == 0:
                raise OSError("out of order")
            if kind == 1:
                os._exit(3)
            if kind == 2 and "0" in self.prompt:
                time.sleep(60)
        return super().step(text)


def shout(text: str) -> str:
    """Say it loudly.

    Args:
        text: What to say.
    """
    return text.upper()


def grade(response: str, conversation: list, environment: float = 0.0) -> float:
    """By the last turn and the number of turns."""
    assert conversation[-1]["role"] != "assistant" or conversation[-1]["content"] == response
    turns = [message for message in conversation if message["role"] == "assistant"]
    assert turns[-1]["content"] == response and environment == sum(turn["reward"] for turn in turns)
    return sum(map(ord, response)) % 3 / 2 + len(turns) / 10


def calls(text: str) -> list:
    """A parser: turns of an odd number of letters shout."""
    return [{"name": "shout", "arguments": {"text": text}}] if len(text) % 2 else []


def letters(response: str, conversation: list) -> float:
    """By all that the model has said."""
    said = [message["content"] for message in conversation if message["role"] == "assistant"]
    return sum(map(ord, "".join(said))) % 5 / 4
