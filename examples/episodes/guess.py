"""An environment for the model: it guesses a number, and is told each time where to look further."""


class GuessTheNumber:
    """From 0 to 31. The number is the answer of the data row; the reward is 1 for finding it."""

    def reset(self, answer: str) -> None:
        """A new game. There is nothing to say before the first guess."""
        self.number = int(answer)

    def step(self, text: str) -> tuple[str, float, bool, bool, dict]:
        """What the model wrote: a guess, as in Gymnasium answered with (observation, reward, terminated, truncated,
        info)."""
        if not text.strip().isdecimal():
            return "give a number", 0.0, False, False, {}
        guess = int(text)
        if guess == self.number:
            return "right", 1.0, True, False, {}
        return "higher" if guess < self.number else "lower", 0.0, False, False, {}
