"""What the metrics say of a run that learns nothing, or in too large steps; each is said once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from mindspeed_rl_plugin.monitor.names import Metric

PAGE = "docs/when-something-goes-wrong.md#it-runs-but-does-not-learn"
LATEST, IDLE = 10, 8  # rollouts that are looked at, and how many of them without a group that differs are too many
FAR = 0.5  # nats per token that a policy may move from one iteration to the next


class LearningWatch:
    """Sees the metrics of one iteration after the other. compares: whether the algorithm compares the responses of a
    prompt, so that a group of equal rewards teaches nothing."""

    def __init__(self, compares: bool) -> None:
        self._idle: deque[bool] | None = deque(maxlen=LATEST) if compares else None  # None: said, or not looked for
        self._kl, self._far = None, False

    def remarks(self, metrics: Mapping[str, Metric]) -> Iterator[str]:
        if self._idle is not None and "groups/informative" in metrics:  # the first iteration of a rollout
            self._idle.append(metrics["groups/informative"] == 0)
            if (idle := sum(self._idle)) >= IDLE:
                seen, self._idle = len(self._idle), None
                yield (
                    f"in {idle} of the last {seen} rollouts all responses of each prompt got one reward (differ 0, "
                    f"solved {metrics['groups/solved']:.2f}): nothing is learned from them; {PAGE}"
                )
        before, self._kl = self._kl, metrics.get("kl/ref", self._kl)
        moved = max(0.0 if before is None else self._kl - before, metrics.get("kl/old", 0.0))
        if moved > FAR and not self._far:
            self._far = True
            yield f"the policy moved by {moved:.2g} nats per token at once (more than {FAR:g}); lower --lr: {PAGE}"
