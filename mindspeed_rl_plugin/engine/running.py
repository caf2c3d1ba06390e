"""A response in generation, token by token."""

from __future__ import annotations

from dataclasses import dataclass, field

from mindspeed_rl_plugin.rows import GenerateRequest


@dataclass
class Running:
    """A response, as far as it is sampled."""

    request: GenerateRequest
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    segments: list[tuple[int, int]] = field(default_factory=list)  # as of `Completion`
    late: int = 0  # how many of its next tokens older weights may have sampled, in steps in flight when the newest came

    @classmethod
    def of(cls, request: GenerateRequest) -> Running:
        """With what was sampled of it before."""
        begun = request.begun
        if begun is None or not begun.tokens:
            return cls(request)
        return cls(request, [*begun.tokens], [*begun.logps], [*begun.segments])

    def expect_late(self, tokens: int, version: int) -> None:
        """The next tokens may still come from weights of `version`: they count as theirs."""
        if tokens and not self.segments:
            self.segments.append((0, version))
        self.late = tokens

    def add(self, token: int, logp: float, version: int) -> None:
        """One more token, by weights of `version` unless it is late."""
        if self.late:
            self.late -= 1
        elif not self.segments or self.segments[-1][1] != version:
            self.segments.append((len(self.tokens), version))
        self.tokens.append(token)
        self.logps.append(logp)
