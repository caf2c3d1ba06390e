"""Three reward functions of one's own; docs/data-and-rewards.md says what they may take and return.

    --rl-reward exact FILE:digits=0.5 FILE:brevity=0.1

FILE is the path of this file.
"""


def digits(response: str, answer: str) -> float:
    """Share of the answer's digits that stand in their place, from the right: 0 to 1, so partly right counts partly."""
    pairs = zip(reversed(response.strip()), reversed(answer.strip()), strict=False)
    return sum(a == b for a, b in pairs) / max(len(response.strip()), len(answer.strip()), 1)


def brevity(response: str, record: dict) -> float:
    """0 up to the `limit` that the data row may name, 100 characters without; then -1 for every further 100."""
    return -max(0, len(response) - record.get("limit", 100)) / 100


async def shortest(responses: list[str], answers: list[str]) -> list[float]:
    """One call per group: 1 for its shortest right responses, 0 for all others. `async` may await a judge here."""
    right = [len(r) for r, a in zip(responses, answers, strict=True) if r.strip() == a]
    best = min(right, default=-1)
    return [float(r.strip() == a and len(r) == best) for r, a in zip(responses, answers, strict=True)]
