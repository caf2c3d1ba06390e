"""Graders that behave in every way that a user's may: loaded by the reward tests from this file."""

import asyncio
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from array import array


def length(response: str) -> float:
    return float(len(response))


def all_names(prompt: str, response: str, answer: str, **record) -> float:
    return len(prompt) + 10 * len(response) + 100 * len(answer) + 1000 * sum(record.values())


def field(response, level, bonus=0.5):
    return level + bonus


def whole_record(record):
    return len(record)


def from_import(response):
    from graders_neighbour import VALUE

    return VALUE


def batch_rank(responses: list[str], records: list[dict]) -> list[float]:
    """Depends on who is in the call: how many are shorter."""
    return [sum(len(o) < len(r) for o in responses) + 10 * len(responses) for r in responses]


def batch_short(prompts):
    return [1.0] * (len(prompts) - 1)


def batch_one_bad(responses):
    return [None if r == "bad" else 1.0 for r in responses]


def batch_of(kind):
    """A batch grader whose result is of a kind."""
    return lambda responses: kind(range(len(responses)))


batch_dict, batch_set = batch_of(lambda some: dict.fromkeys(some, 1.0)), batch_of(set)
batch_text, batch_generator = batch_of(lambda some: "1" * len(some)), batch_of(lambda some: (1.0 for _ in some))
batch_tuple, batch_array = batch_of(lambda some: (1.0,) * len(some)), batch_of(lambda some: array("d", some))


def spawns(responses):
    """Grades in processes of its own, which import this file by its name."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.map(length, responses)


def batch_loop(responses):
    while "bad" in responses:
        pass
    return [1.0] * len(responses)


def nap(response: str) -> float:
    time.sleep(float(response))
    return float(response)


async def async_sleep(response: str) -> float:
    await asyncio.sleep(0.3)
    return float(len(response))


LIMITED = asyncio.Semaphore(2)


async def async_limited(response: str) -> float:
    """At most two at a time, of all calls of a process."""
    async with LIMITED:
        await asyncio.sleep(0.05)
    return 1.0


async def async_groups(responses):
    async with LIMITED:
        await asyncio.sleep(0.05)
    return [1.0] * len(responses)


async def async_wait(response: str) -> float:
    if response == "bad":
        await asyncio.sleep(100)
    return 1.0


async def async_block(response: str) -> float:
    await asyncio.sleep(0.01)
    if response == "bad":
        while True:
            pass
    return 1.0


async def async_batch(responses):
    await asyncio.sleep(0.01)
    return [float(len(r)) for r in responses]


class Judge:
    async def __call__(self, response):
        return 7


judge = Judge()


def loop(response):
    while response == "bad":
        pass
    return 1.0


def dawdle(response):
    time.sleep(0.2)
    return 1.0


def stubborn(response):
    """Ignores every signal that can be ignored, inside a regular expression that holds the interpreter."""
    if response == "bad":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        re.match(r"(a+)+$", "a" * 60 + "b")
    return 1.0


def child(response):
    if response == "bad":
        process = subprocess.Popen(["sleep", "1000"])
        with open(os.environ["RL_TEST_PID_FILE"], "w") as file:
            file.write(str(process.pid))
        process.wait()
    return 1.0


def on_bad(what):
    return lambda response: what() if response == "bad" else True


sleep = on_bad(lambda: time.sleep(1000))
raises = on_bad(lambda: {}["the key"])
leaves = on_bad(lambda: sys.exit(3))
crash = on_bad(lambda: os._exit(7))
nan = on_bad(lambda: math.nan)
none = on_bad(lambda: None)


def prints(response):
    print("noise on stdout")
    return 1.0


def positional_only(response, /):
    return 1.0


def takes_nothing():
    return 1.0


def batch_strange(responses, other):
    return []


NOT_CALLABLE = 3


def verls(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0


def verls_with_rest(solution_str, **rest):
    return 1.0


def trls(prompts, completions, **rest):
    return [1.0] * len(prompts)
