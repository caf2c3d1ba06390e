"""A reward that an untrained model earns differently from response to response, so that updates move weights."""


def grade(prompt: str, response: str, answer: str) -> float:
    """In 0..1, by the characters of the response."""
    return sum(map(ord, response)) % 5 / 4
