"""The messages between a job and processes outside of the job, except for those about rows."""

from __future__ import annotations

from mindspeed_rl_plugin.dock import messages
from mindspeed_rl_plugin.dock.messages import Message


class News(Message):
    """Asks for an announcement with a number above `after`. After `deadline` seconds the last one is the answer."""

    after: int
    deadline: float


class Announced(Message):
    """The newest weights of the job."""

    number: int = 0  # of the announcement, from 1; 0: nothing is announced yet
    version: int = -1


class Follow(Message):
    """Asks for the job's records after the first `after` ones. If none come in `deadline` s, the answer is empty."""

    after: int
    deadline: float


class Told(Message):
    """Records of the job: lines of metrics.jsonl."""

    first: int  # number of the first line, from 1; older records are not kept
    lines: list[str]  # JSON


class SubmitPrompts(Message):
    """Gives prompts to the job."""

    rows: list[str]  # prompts, each as JSON
    deadline: float  # seconds to wait until the job accepts them


class PromptNumbers(Message):
    """The job's number of each prompt."""

    numbers: list[int]


class Report(Message):
    """What a process outside of the job did."""

    counts: dict[str, float]  # by name, since it joined
    spans: list[tuple[str, float, float]] = []  # (what, begin, end in seconds since 1970), since its last report


messages.add(News, Announced, Follow, Told, SubmitPrompts, PromptNumbers, Report)
