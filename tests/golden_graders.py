"""User code of the golden runs: rewards that an untrained model earns differently from response to response, an
environment, a tool and its parser."""


def by_characters(prompt, response, answer):
    return sum(map(ord, response)) % 5 / 4


def odd_only(prompt, response, answer):
    """All responses to an even number earn the same: dynamic sampling replaces their groups."""
    return by_characters(prompt, response, answer) if int(prompt.split("*")[0]) % 2 else 1.0


class Talk:
    """An environment that answers anything with a number, and rewards each turn by its characters."""

    def reset(self, seed: int):
        self.turns = seed % 2

    def step(self, text: str):
        self.turns += 1
        return f"[{self.turns}]", sum(map(ord, text)) % 5 / 4, self.turns >= 4


def shout(text: str) -> str:
    """Say it loudly.

    Args:
        text: What to say.
    """
    return text.upper()


def calls(text: str) -> list:
    """Read a turn of an odd number of characters as a call of `shout`."""
    return [{"name": "shout", "arguments": {"text": text}}] if len(text) % 2 else []
