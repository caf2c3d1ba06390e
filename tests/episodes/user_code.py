"""Tools and environments that behave in every way that a user's may: loaded by the tests of episodes from this file."""

import asyncio
import ctypes
import os
import random
import re
import signal
import subprocess
import sys
import time


def multiply(a: int, b: int = 2) -> int:
    """Multiply two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a * b


def say(text: str) -> str:
    """Say something.

    Args:
        text: What.
    """
    return text


def repeat(text: str) -> str:
    """Say something again.

    Args:
        text: What was said.
    """
    return text


def lines(text):
    """A parser: a line is a call."""
    calls = [line.split() for line in text.splitlines() if line.startswith("CALL")]
    return [{"name": call[1], "arguments": {"a": int(call[2])}} if len(call) == 3 else None for call in calls]


def parser_that_raises(text):
    return [][0]


def parser_that_goes_wrong(text):
    """Later."""
    return PARSED[text]() if text else []


PARSED = {
    "raises": lambda: "so".index("nothing"),
    "endless": lambda: [{"name": "a", "arguments": {"b": "x" * (1 << 18)}}],
    "hangs": lambda: _stuck_in_c(),
}


async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return f"waited {seconds}"


def wrapped(seconds: float):
    """Give what is to be awaited, as a decorator of `async def` does.

    Args:
        seconds: How long.
    """
    time.sleep(0.2)
    return wait(seconds)


LIMITED = asyncio.Semaphore(2)
TIMES = {"now": 0, "most": 0}


async def limited(seconds: float) -> str:
    """Wait, at most two at a time.

    Args:
        seconds: How long.
    """
    async with LIMITED:
        TIMES["now"] += 1
        TIMES["most"] = max(TIMES.values())
        await asyncio.sleep(seconds)
        TIMES["now"] -= 1
    return f"at most {TIMES['most']}"


async def block(kind: str) -> str:
    """Hold the event loop up, in which others are.

    Args:
        kind: In which way.
    """
    await asyncio.sleep(0.1)
    return FAULTS[kind]()


def runs(seconds: float) -> str:
    """Have an event loop of its own.

    Args:
        seconds: How long.
    """
    return asyncio.run(wait(seconds))


def nap(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return f"slept {seconds}"


def fault(kind: str) -> str:
    """Go wrong.

    Args:
        kind: In which way.
    """
    return FAULTS[kind]()


def _raises():
    raise ValueError("two\nlines" + "!" * 500)


def _loops():
    while True:
        pass


def _stuck_in_c():
    """Ignores what can be ignored, in a regular expression that holds the interpreter."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    re.match(r"(a+)+$", "a" * 60 + "b")


def _leaves_a_session():
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return "left"


def _hangs_beside_a_session():
    _leaves_a_session()
    time.sleep(1000)


def _both_go_on():
    return "child" if os.fork() == 0 else "parent"


def _child_holds_the_pipe():
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(5)


def _prints():
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    while True:
        print("x" * 4096)


def _into_the_pipe(text: bytes):
    for number in os.listdir("/proc/self/fd"):
        link = f"/proc/self/fd/{number}"
        if os.path.exists(link) and os.readlink(link).startswith("socket:"):
            os.write(int(number), text)
    time.sleep(1000)


FAULTS = {
    "raises": _raises,
    "exits": lambda: sys.exit(3),
    "loops": _loops,
    "stuck in C": _stuck_in_c,
    "ends": lambda: os._exit(7),
    "segfault": lambda: ctypes.string_at(0),
    "leaves a session": _leaves_a_session,
    "hangs beside a session": _hangs_beside_a_session,
    "both go on": _both_go_on,
    "child holds the pipe": _child_holds_the_pipe,
    "endless text": lambda: "x" * 30_000_000,
    "half a pair": lambda: "a\ud800b\x00",
    "prints": _prints,
    "pickle in the pipe": lambda: _into_the_pipe(b"\x00\x00\x00\x05I1\n.x"),
    "bytes in the pipe": lambda: _into_the_pipe(b'\x00\x00\x00\x1d[["\xff"],0,false,null,null,0.5]'),
    "gigabyte in the pipe": lambda: _into_the_pipe(b"\x3f\xff\xff\xff" + b"x" * 10000),
    "no text": lambda: [1, 2],
}


class Count:
    """Says how often it was called, and which process asks. `log`: a file that knows of all of its lives."""

    def reset(self, seed, log=None, **record):
        self.calls, self.log, self.seed, self.episode = 0, log, seed, os.environ["MINDSPEED_RL_EPISODE"]
        self.note("reset")
        if "reset" in record:
            return FAULTS[record["reset"]]()
        return None if log is None else f"{record['prompt']} {seed}"

    def step(self, text):
        self.calls += 1
        if text == "names":
            return f"{os.environ['MINDSPEED_RL_RUN']} {self.episode}", 0.0, False
        if text == "pid":
            return str(os.getpid()), 0.0, False
        if text == "late":
            return None, 0.25, False, True, {}
        if text.startswith("nap"):
            time.sleep(float(text[4:]))
        if text.startswith("meet"):  # three episodes at once
            open(f"{text[5:]}/{self.episode.replace('/', '-')}", "w").close()
            while len(os.listdir(text[5:])) < 3:
                time.sleep(0.01)
        if text in FAULTS:
            return FAULTS[text](), 0.0, False
        return f"{self.calls} {text} {random.Random(self.seed).random():.3f}", 0.5, text == "end", {}

    def get_reward(self):
        return self.calls / 4

    def close(self):
        self.note("close")

    def note(self, what):
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{what} {os.getpid()}\n")


class Fickle(Count):
    """Answers otherwise in each process."""

    def step(self, text):
        return f"{super().step(text)[0]} in {os.getpid()}", 0.0, False


class BadClose(Count):
    def close(self):
        raise OSError("no such sandbox")


class SlowClose(Count):
    def close(self):
        super().close()
        time.sleep(1000)


class Slow:
    """Does not begin in time. own: a limit of its own."""

    async def reset(self, own=1000.0):
        await asyncio.wait_for(asyncio.sleep(1000), own)

    def step(self, text): ...


class Judge:
    """Its reward is what the row says."""

    def reset(self, give):
        self.give = give

    def step(self, text):
        return {"observations": [{"role": "user", "content": "go on"}], "reward": 1, "done": False, "metadata": {}}

    def get_reward(self):
        return {"nan": float("nan")}.get(self.give, self.give) if self.give != "raises" else _raises()


class Shop:
    """As TRL has them: public methods are tools."""

    async def reset(self, **kwargs):
        self.basket, self.loop = [], asyncio.get_running_loop()
        return f"You have {kwargs['money']}."

    async def buy(self, item: str) -> str:
        """Buy something.

        Args:
            item: What.
        """
        assert asyncio.get_running_loop() is self.loop
        self.basket.append(item)
        return f"basket: {self.basket}"

    def fail(self, kind: str) -> str:
        """Fail.

        Args:
            kind: How.
        """
        return FAULTS[kind]()

    def get_reward(self) -> float:
        return len(self.basket)

    def _helper(self):
        pass


class SlowShop(Shop):
    """Buys half of a thing, and then gets stuck. `log`: a file that knows when it was closed."""

    async def reset(self, log, **kwargs):
        self.log = log
        return await super().reset(**kwargs)

    async def wait(self) -> str:
        """Wait."""
        self.basket.append("half")
        await asyncio.sleep(1000)

    def hang(self) -> str:
        """Hang."""
        self.basket.append("half")
        time.sleep(1000)

    def end(self) -> str:
        """End."""
        os._exit(7)

    def close(self):
        with open(self.log, "a") as file:
            file.write(f"closed with {self.basket}\n")


# What is refused


def no_hint(a):
    """Nothing.

    Args:
        a: A thing.
    """


def stars(*a: int) -> int:
    """Nothing.

    Args:
        a: Things.
    """


def positional(a: int, /) -> int:
    """Nothing.

    Args:
        a: A thing.
    """


class NoReset:
    def step(self, text): ...


class Nothing:
    def reset(self): ...

    def close(self): ...


class Needs:
    def __init__(self, size): ...

    def reset(self): ...

    def step(self, text): ...


class TwoSteps:
    def reset(self): ...

    def step(self, one, two): ...


class Stars:
    def reset(self): ...

    def tool(self, *things): ...


class Same:
    def reset(self): ...

    def multiply(self): ...


class Asks:
    def reset(self, level, depth=1, *, answer): ...

    def step(self, text): ...


not_callable = 3
