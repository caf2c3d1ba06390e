"""What a user's code offers: schemas, what is refused, forms of `reset` and `step`, and a model's arguments."""

from pathlib import Path
from typing import Any, Literal

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_rl_plugin.episodes.tools import (
    Answer,
    Offer,
    fits,
    load_environment,
    load_tool,
    offer_of,
    read_calls,
    read_reset,
    read_step,
    reset_arguments,
    schema_of,
    takes,
)

pytestmark = pytest.mark.quick

FILE = str(Path(__file__).with_name("user_code.py"))


def test_a_schema_has_hints_docstring_and_the_name_of_the_flag() -> None:
    schema = schema_of("", "times", load_tool(FILE, "multiply"))["function"]
    assert (schema["name"], schema["description"]) == ("times", "Multiply two numbers.")
    assert schema["parameters"]["properties"]["b"] == {"type": "integer", "description": "The second one."}
    assert schema["parameters"]["required"] == ["a"]
    method = schema_of("", "buy", load_environment(FILE, "Shop").buy)["function"]
    assert list(method["parameters"]["properties"]) == ["item"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_hint", "--rl-tools: no_hint cannot be shown to a model: .* a is missing a type hint.*; give each"),
        ("stars", r"stars takes \*a; a model's arguments have names"),
        ("positional", "positional takes a, /; "),
        ("Count", "Count is a class; give it to --rl-environment"),
        ("not_callable", "'not_callable' of .* is 3 of type int, no function"),
    ],
)
def test_a_function_that_is_no_tool_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schema_of("--rl-tools", name, load_tool(FILE, name))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoReset", "NoReset has no reset; add this method"),
        ("Needs", r"Needs\(\) needs size; it is called without arguments"),
        ("TwoSteps", r"TwoSteps.step takes \(self, one, two\); it is called with one text"),
        ("Stars", r"Stars.tool takes \*things; "),
        ("Same", "Same and --rl-tools both have multiply; rename"),
    ],
)
def test_a_class_that_is_no_environment_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        offer_of({"multiply": None}, load_environment(FILE, name))


def test_what_a_class_offers() -> None:
    assert offer_of({"f": None}, load_environment(FILE, "Count")) == Offer(("f",), (), True, True, ())
    concurrent = ("method buy", "reset")
    assert offer_of({}, load_environment(FILE, "Shop")) == Offer((), ("buy", "fail"), False, True, (), concurrent)
    assert offer_of({"w": load_tool(FILE, "wait")}, load_environment(FILE, "Slow")).concurrent == ("tool w", "reset")
    assert offer_of({}, load_environment(FILE, "Asks")).fields == ("level",)


@pytest.mark.parametrize(
    "found", ["calls", [{"name": "a", "arguments": "b"}], [{"name": "a", "arguments": {"b": {1}}}]]
)
def test_what_a_users_parser_gives_is_calls_as_json(found) -> None:
    assert read_calls([{"name": "a", "arguments": None}, None]) == '[["a", {}], null]'
    with pytest.raises(ValueError, match="it returned "):
        read_calls(found)


TASK = {"prompt": "p", "answer": "a", "record": {"level": 3, "seed": 9, "prompt": "other"}, "messages": [{}]}


@pytest.mark.parametrize(
    ("reset", "takes"),
    [
        (lambda: 0, {}),
        (lambda seed=None, options=None: 0, {"seed": 2}),
        (lambda *, answer, level, other=1: 0, {"answer": "a", "level": 3}),
        (lambda messages, record: 0, {"messages": [{}], "record": TASK["record"]}),
        (lambda **kwargs: 0, {"level": 3, "seed": 2, "prompt": "p", "answer": "a"}),
        (lambda prompt, **kwargs: 0, {"level": 3, "seed": 2, "prompt": "p", "answer": "a"}),
    ],
)
def test_reset_is_given_what_it_names(reset, takes) -> None:
    assert reset_arguments(reset, TASK, (5 << 32) + 2) == takes


def test_what_reset_says() -> None:
    assert [read_reset(value).texts for value in (None, "hi", ("hi", {}), (None, {}))] == [(), ("hi",), ("hi",), ()]
    with pytest.raises(ValueError, match="an observation of type int, not a text: 3; turn it"):
        read_reset(3)
    with pytest.raises(ValueError, match="role user and a text"):
        read_reset([{"role": "system", "content": "hi"}])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (("o", 0.5, True, False, {}), Answer(("o",), 0.5, True)),
        ((None, True, False, True, {}), Answer((), 1.0, True)),
        (("o", 1, False, {"x": 1}), Answer(("o",), 1.0, False)),
        (("o", -1, 1), Answer(("o",), -1.0, True)),
        ({"reward": 2, "done": False, "metadata": {}}, Answer((), 2.0, False)),
        (
            {"observations": [{"role": "user", "content": c} for c in "ab"], "reward": 0, "done": True},
            Answer(("a", "b"), 0.0, True),
        ),
    ],
)
def test_forms_of_step(value, said: Answer) -> None:
    assert read_step(value) == said


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("text", "it returned 'text' of type str; give "),
        (("o", 1.0), "of type tuple; give "),
        ({"observations": "o", "done": True}, "of type dict; give "),
        (("o", 1, "no"), "'no' for whether the episode is over"),
        (("o", 1, False, None, {}), "None for whether the episode is over"),
        (("o", float("nan"), False), "nan, not a finite number"),
        ((b"o", 1, False), "an observation of type bytes, not a text: b'o'; turn"),
    ],
)
def test_other_forms_of_step_are_refused(value, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_step(value)


def called(a: int, b: float = 0.5, *, c: Literal["x", "y"] = "x", d: list[str] | None = None, e: dict | int = 1) -> Any:
    """Called.

    Args:
        a: One.
        b: One.
        c: One.
        d: One.
        e: One.
    """


PAIR = {"type": "object", "properties": {"p": {"type": "array", "prefixItems": [{"type": "integer"}, {}]}}}


def test_arguments_of_a_function() -> None:
    schema = schema_of("", "called", called)["function"]["parameters"]
    good = [{"a": 1}, {"a": 1, "b": 2, "c": "y", "d": ["s"], "e": {"k": 1}}, {"a": 1, "d": None, "e": 3}]
    bad = [
        *({}, {"a": "1"}, {"a": True}, {"a": 1.5}, {"a": None}, {"a": 1, "z": 2}, {"a": 1, "b": "2"}),
        *({"a": 1, "c": "z"}, {"a": 1, "d": [1]}, {"a": 1, "d": "s"}, {"a": 1, "e": "s"}),
    ]
    assert [fits(value, schema) for value in (*good, *bad)] == [True] * len(good) + [False] * len(bad)
    assert takes(schema) == (
        "a: integer, b: number (optional), c: 'x' or 'y' (optional), d: array (optional), "
        "e: integer or object (optional)"
    )
    assert takes({"type": "object", "properties": {}}) == "no arguments"
    assert [fits({"p": p}, PAIR) for p in ([1, "s"], [1], [1, 2, 3], ["s", 1])] == [True, False, False, False]


TYPES = st.sampled_from(["integer", "number", "string", "boolean", "null", "array", "object"])
SCHEMAS = st.recursive(
    st.one_of(
        st.just({}),
        st.builds(lambda t: {"type": t}, st.one_of(TYPES, st.lists(TYPES, min_size=1, max_size=3))),
        st.builds(lambda e: {"type": "string", "enum": e}, st.lists(st.sampled_from("abc"), min_size=1)),
    ),
    lambda inner: st.one_of(
        st.builds(lambda i: {"type": "array", "items": i}, inner),
        st.builds(lambda i: {"type": "object", "additionalProperties": i}, inner),
        st.builds(lambda one, two: {"anyOf": [one, two]}, inner, inner),
        st.builds(
            lambda p, r: {"type": "object", "properties": p, "required": r, "additionalProperties": False},
            st.dictionaries(st.sampled_from("ab"), inner),
            st.lists(st.sampled_from("ab"), unique=True),
        ),
    ),
    max_leaves=6,
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(0, 3), st.just(0.5), st.sampled_from("abc")),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("ab"), inner)),
    max_leaves=6,
)


@given(SCHEMAS, VALUES)
def test_arguments_fit_as_jsonschema_says(schema, value) -> None:
    """Where types of Python and JSON do not differ (1.0), and unknown names are refused in the schema."""
    assert fits(value, schema) == jsonschema.Draft202012Validator(schema).is_valid(value)
