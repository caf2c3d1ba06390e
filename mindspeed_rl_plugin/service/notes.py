"""What a job and processes outside of it say to each other besides rows."""

from __future__ import annotations

from mindspeed_rl_plugin.dock import messages
from mindspeed_rl_plugin.dock.messages import Message


class News(Message):
    """Asks for an announcement with a higher number than `after`, or for the last one when `deadline` seconds are
    over."""

    after: int
    deadline: float


class Announced(Message):
    """number: running, from 1, 0 where nothing is announced yet; version: of the newest weights."""

    number: int = 0
    version: int = -1


class Follow(Message):
    """Asks for the records of the job behind the first `after`, or for none when `deadline` seconds are over."""

    after: int
    deadline: float


class Told(Message):
    """Records of the job as JSON, the first of them number `first`, from 1: older ones are not kept."""

    first: int
    lines: list[str]


class SubmitPrompts(Message):
    """Gives rows of prompts to the job, as JSON, and waits for room, `deadline` seconds."""

    rows: list[str]
    deadline: float


class PromptNumbers(Message):
    """The job's number of each row."""

    numbers: list[int]


class Report(Message):
    """What a process outside of the job has counted since it joined, by name, and what it did since its last report:
    what, and from when to when, seconds since 1970."""

    counts: dict[str, float]
    spans: list[tuple[str, float, float]] = []


messages.add(News, Announced, Follow, Told, SubmitPrompts, PromptNumbers, Report)
