"""The graders that come with the plugin. They run inside a worker process."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindspeed_rl_plugin.reward.answers import NOTHING, expression, graded_part, is_number
from mindspeed_rl_plugin.reward.specs import Spec


def make_builtin(name: str, regex: str | None) -> Callable[..., float]:
    """The grader `name`, ready to be called without further imports: `f(response, answer) -> 0.0 or 1.0`, or
    `environment`."""
    if name == "exact":
        return exact
    if name == "environment":
        return environment
    if name == "regex":
        return _make_regex(regex)
    assert name == "math", name
    return _make_math()


def check_answers(specs: Sequence[Spec], regex: str | None, answers: Mapping[str, str]) -> None:
    """Raises ValueError if a built-in grader cannot read a ground truth. answers: place in the data -> ground truth."""
    asked = {where: answer for where, answer in answers.items() if not is_number(answer)}
    for grade in [make_builtin(spec.name, regex) for spec in specs if asked and spec.compares]:
        for where, answer in asked.items():
            try:
                grade("", answer)
            except (ValueError, ArithmeticError, RecursionError) as error:
                raise ValueError(f"{where}: {error}") from error


def exact(response: str, answer: str) -> float:
    """1.0 if response and answer are equal except for white space. Raises ValueError without an answer."""
    return float(_words(response) == _truth(answer, "exact"))


def environment(environment: float) -> float:
    """The sum of the rewards that the environment gave."""
    return environment


def _make_regex(pattern: str) -> Callable[[str, str], float]:
    compiled = re.compile(pattern)

    def grade(response: str, answer: str) -> float:
        truth, last = _truth(answer, "regex"), None
        for match in compiled.finditer(response):  # the last one: answers come at the end
            last = match
        if last is None:
            return 0.0
        text = last[1] if compiled.groups else last[0]
        return float(text is not None and _words(text) == truth)

    return grade


def _make_math() -> Callable[[str, str], float]:
    """Mathematical equality, by math-verify, of the answers that `answers` finds in response and ground truth.

    math-verify's own time limits are off, because they count a timeout as a wrong answer; the worker's limit reports
    it. With `raise_on_error` a crash is reported, too. A response without mathematics gets 0.0; a ground truth without
    mathematics is an error.
    """
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    from math_verify import parse, verify
    from sympy import SympifyError

    @functools.lru_cache
    def truth_of(answer: str) -> list[Any]:
        last = answer.rpartition("####")[2]  # GSM8K: the solution, then #### and the result
        read = parse(expression(last), parsing_timeout=None, raise_on_error=True)
        if NOTHING.fullmatch(answer) or all(isinstance(t, str) for t in read):
            raise ValueError(
                f"the answer {answer!r:.80} cannot be parsed as mathematics; correct the data, or use the grader exact"
            )
        return read

    def grade(response: str, answer: str) -> float:
        truth, part = truth_of(answer), graded_part(response)
        if part is None:
            return 0.0
        try:
            parsed = parse(part, parsing_timeout=None, raise_on_error=True)
        except SympifyError:  # raised by math-verify for some texts that it cannot parse
            return 0.0
        return float(verify(truth, parsed, timeout_seconds=None, raise_on_error=True))

    grade("\\boxed{1}", "1")  # builds the parser's tables now, not within a call's time limit
    return grade


def _truth(answer: str, grader: str) -> str:
    truth = _words(answer)
    if not truth:
        raise ValueError(f"{grader}: the data has no ground truth for this prompt; set --rl-answer-key")
    return truth


def _words(text: str) -> str:
    return " ".join(text.split())
