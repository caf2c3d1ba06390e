"""What the tests of `EnvironmentPool` share: short words for what is asked."""

import contextlib
from pathlib import Path

from mindspeed_rl_plugin.episodes.environment_pool import EnvironmentPool
from mindspeed_rl_plugin.episodes.environment_process import Desk
from mindspeed_rl_plugin.episodes.environments import Reply, ToolCall, Turn, Unread
from mindspeed_rl_plugin.episodes.tools import load_environment, load_tool
from mindspeed_rl_plugin.rows import SampleId
from mindspeed_rl_plugin.workers.process import Worker

FILE = str(Path(__file__).with_name("user_code.py"))
FUNCTIONS = ("multiply", "nap", "wait", "fault")


def schemas(pool: EnvironmentPool) -> list:
    """As another process makes them, which has to import transformers first."""
    sources = pool._sources
    environment = pool._environment and load_environment(FILE, pool._environment.name)
    return Desk({s.name: load_tool(s.file, s.name) for s in sources}, environment, 1.0).schemas()


def below(worker: Worker) -> int:
    """The process that runs a user's code, below its keeper."""
    return int(Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text())


def sample(number: int) -> SampleId:
    return SampleId(0, 0, number)


def task(**record) -> dict:
    return {"prompt": "the prompt", "answer": "a", "record": record, "messages": None}


def turn(text: str, *attempts) -> Turn:
    return Turn((1,), text, attempts)


def unread(text: str, most: int | None = None, said: str = "said") -> Turn:
    """A turn whose calls a user's parser finds. said: as an environment sees it."""
    return Turn((1,), said, Unread(text, most))


def call(name: str, **arguments) -> ToolCall:
    return ToolCall(name, arguments)


def replies(pool: EnvironmentPool) -> dict[int, Reply]:
    """All that are due, by the number of the episode."""
    given: list[Reply] = []
    while pool.pending:
        given += pool.poll(5)
    assert len({reply.id for reply in given}) == len(given)
    return {reply.id.member: reply for reply in given}


def contents(reply: Reply) -> list[str]:
    assert reply.failure is None, reply.failure
    return [message["content"] for message in reply.messages]


def act(pool: EnvironmentPool, number: int, text: str, *attempts) -> Reply:
    pool.act(sample(number), turn(text, *attempts))
    return replies(pool)[number]


def begin(pool: EnvironmentPool, numbers, **record) -> None:
    for number in numbers:
        pool.begin(sample(number), task(**record), 7)
    assert all(reply.failure is None for reply in replies(pool).values())


def alive(mark: str) -> set[int]:
    """Processes that have it in their environment."""
    found = set()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in environ.read_bytes():
                found.add(int(environ.parent.name))
    return found
