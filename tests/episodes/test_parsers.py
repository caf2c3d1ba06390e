"""Calls as they are read: what the templates write comes back, each attempt has a result of its own, no text breaks a
parser, and one that does not fit is refused."""

import json

import pytest
from families import make_tokenizer, template, tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl_plugin.episodes.environments import MalformedCall, ToolCall
from mindspeed_rl_plugin.episodes.parsers import NO_CALL, NO_JSON, NOT_CLOSED, PARSERS, make_parser
from mindspeed_rl_plugin.prompts.render import render_chat

QUICK = settings(max_examples=40, deadline=None)
WRITES = {"qwen2_5": "hermes", "qwen3": "hermes", "llama3_1": "llama3", "llama3_2": "llama3", "deepseekv3": "deepseek"}
ONE, TWO = ToolCall("add", {"a": 1, "b": 2}), ToolCall("search", {"for": "x"})
TAGS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", ";", "{", '{"name": "a", ', "}"),
    *(f"<｜tool▁{name}｜>" for name in ("call▁begin", "call▁end", "sep")),
]

names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
texts = st.lists(st.text(st.characters(codec="utf-8"), max_size=5) | st.sampled_from(TAGS), max_size=4).map("".join)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
calls = st.builds(ToolCall, names, st.dictionaries(texts, values, max_size=3))


def written(parser, call, strict=True):
    """A call as a model writes it."""
    arguments = json.dumps(call.arguments, ensure_ascii=strict)
    if parser == "hermes":
        return f'<tool_call>\n{{"name": "{call.name}", "arguments": {arguments}}}\n</tool_call>'
    if parser == "llama3":
        return f'{{"name": "{call.name}", "parameters": {arguments}}}'
    begin, sep, end = (f"<｜tool▁{name}｜>" for name in ("call▁begin", "sep", "call▁end"))
    return f"{begin}function{sep}{call.name}\n```json\n{arguments}\n```{end}"


def turn(parser, parts):
    """A turn of calls, and of texts in their place."""
    if parser == "llama3":
        return "; ".join(parts)
    inside = "\n".join(parts)
    return inside if parser == "hermes" else f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


@pytest.mark.parametrize("name", WRITES)
@QUICK
@given(call=calls)
def test_what_a_template_writes_is_read_by_the_parser_that_auto_chooses(name, call):
    tokenizer = tokenizer_of(name)
    question = {"role": "user", "content": "?"}
    arguments = json.dumps(call.arguments) if name == "deepseekv3" else call.arguments
    entry = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    whole = render_chat(tokenizer, [question, {"role": "assistant", "content": "", "tool_calls": [entry]}], ())
    said = whole.partition("<|start_header_id|>assistant<|end_header_id|>\n\n")[2] or whole.partition("?")[2]
    said = said.removeprefix("<|im_end|>\n<|im_start|>assistant\n").removeprefix("<think>\n\n</think>\n\n")
    assert make_parser("auto", tokenizer)(said) == [call]
    assert make_parser("auto", tokenizer) is make_parser(WRITES[name], tokenizer)


@pytest.mark.parametrize("parser", PARSERS)
@QUICK
@given(made=st.lists(calls, min_size=1, max_size=3), strict=st.booleans())
def test_several_calls_in_one_turn(parser, made, strict):
    text = turn(parser, [written(parser, call, strict) for call in made])
    assert PARSERS[parser](text) == made
    thought = turn(parser, [written(parser, ONE)])
    assert PARSERS[parser](f"<think>\nI could use {thought} or not.</think>\n\n{text}") == made
    assert PARSERS[parser](f"I use {thought} or not.\n</think>\n\n{text}") == made, "the prompt began the block"


BROKEN = {
    "hermes": {
        '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>': NO_JSON,
        "<tool_call>add(1, 2)</tool_call>": NO_JSON,
        "<tool_call>{<think>}</tool_call>": NO_JSON,
        '<tool_call>{"name": "add", "arguments": {}} and so on</tool_call>': NO_JSON,
        '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>': NO_CALL,
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>': NO_CALL,
        '<tool_call>{"name": "", "arguments": {}}</tool_call>': NO_CALL,
        '<tool_call>{"arguments": {}}</tool_call>': NO_CALL,
        '<tool_call>["add", 1]</tool_call>': NO_CALL,
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>': NO_JSON,
        '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>': NO_JSON,
        '<tool_call>{"name": "add", "arguments": {"a": ' + "1" * 5000 + "}}</tool_call>": NO_JSON,
        "<tool_call>" + "[" * 100_000 + "</tool_call>": NO_JSON,
        '<tool_call>{"name": "add", "arguments": {"a": 1}}': NOT_CLOSED,
        "<tool_call>": NOT_CLOSED,
    },
    "llama3": {
        '{"name": "add", "parameters": {"a": 1}': NO_JSON,
        '{"name": "add", parameters: 1}': NO_JSON,
        '{"name": "add", "parameters": [1]}': NO_CALL,
        '{"type": "function", "parameters": {}}': NO_CALL,
    },
    "deepseek": {
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{]\n```<｜tool▁call▁end｜>": NO_JSON,
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n[1]\n```<｜tool▁call▁end｜>": NO_CALL,
        "<｜tool▁call▁begin｜>add<｜tool▁call▁end｜>": NO_JSON,
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{}\n```": NOT_CLOSED,
    },
}


@pytest.mark.parametrize(
    ("parser", "text", "why"), [(p, text, why) for p, broken in BROKEN.items() for text, why in broken.items()], ids=str
)
def test_one_attempt_that_cannot_be_read_leaves_the_others(parser, text, why):
    read, before, behind = PARSERS[parser], written(parser, ONE), written(parser, TWO)
    assert read(turn(parser, [text])) == [why]
    assert read(turn(parser, [before, text])) == [ONE, why]
    assert read(turn(parser, [before, text, behind])) == [ONE, why, TWO]


@pytest.mark.parametrize(
    ("parser", "text", "expected"),
    [
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', [ToolCall("now", {})]),
        ("hermes", 'Now.<tool_call>\n\n{"arguments": {"a": 1, "b": 2}, "name": "add"}</tool_call> Done.', [ONE]),
        ("hermes", '<think>\n<tool_call>{"name": "now"}</tool_call>', []),
        ("hermes", '<tool_call>{"name": "now"}</tool_call><think>Hm. <tool_call>?', [ToolCall("now", {})]),
        ("hermes", "It is 12.", []),
        ("hermes", '{"name": "now", "arguments": {}}', []),
        ("llama3", '<|python_tag|>{"name": "now", "parameters": {}}', [ToolCall("now", {})]),
        ("llama3", 'I look. <|python_tag|>{"name": "now", "parameters": {}}', [ToolCall("now", {})]),
        ("llama3", '\n{"type": "function", "name": "now", "parameters": null}\n', [ToolCall("now", {})]),
        ("llama3", '{"name": "add", "arguments": {"a": 1, "b": 2}}\n{"name": "now"}', [ONE, ToolCall("now", {})]),
        ("llama3", '{"name": "now"};<|python_tag|>{"name": "now"};', [ToolCall("now", {})] * 2),
        ("llama3", "<|python_tag|>print(3 * 4)", [NO_JSON]),
        ("llama3", '{"answer": 12}', []),
        ("llama3", "{1, 2}", []),
        ("llama3", 'It is {"name": "now"}', []),
        ("llama3", '<think>{"name": "now"} <|python_tag|>', []),
        ("deepseek", "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{\"a\": 1, \"b\": 2}<｜tool▁call▁end｜>", [ONE]),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}<｜tool▁call▁end｜>", [ToolCall("function", {})]),
    ],
)  # fmt: skip
def test_what_is_a_call(parser, text, expected):
    assert PARSERS[parser](text) == expected


@pytest.mark.parametrize("parser", PARSERS)
@settings(QUICK, max_examples=100)
@given(parts=st.lists(texts | st.sampled_from([ONE, TWO]), max_size=6))
def test_no_text_breaks_a_parser(parser, parts):
    text = "".join(written(parser, part) if isinstance(part, ToolCall) else part for part in parts)
    attempts = PARSERS[parser](text)
    assert all(isinstance(attempt, (ToolCall, MalformedCall)) for attempt in attempts)
    for attempt in attempts:
        if isinstance(attempt, ToolCall):
            assert json.loads(json.dumps(attempt.arguments)) == attempt.arguments
    begins = {"hermes": text.count("<tool_call>"), "deepseek": text.count("call▁begin"), "llama3": text.count("{")}
    assert len(attempts) <= begins[parser] + text.count("<|python_tag|>")


def test_a_parser_whose_tokens_the_tokenizer_lacks_is_refused():
    with pytest.raises(ValueError, match="no token '<｜tool▁calls▁begin｜>', .*; give .*hermes, llama3"):
        make_parser("deepseek", tokenizer_of("qwen2_5"))
    assert make_parser("deepseek", tokenizer_of("deepseekv3")) is PARSERS["deepseek"]


def test_auto_is_refused_where_the_template_does_not_tell():
    no_calls, other_form = tokenizer_of("llama3"), make_tokenizer("qwen3", template("qwen3_5_nothink"))
    none = make_tokenizer("qwen3")
    none.chat_template = None
    raises = make_tokenizer("qwen3", "{{ '%(name)s' % messages[0] }}")
    for tokenizer in (no_calls, other_form, none, raises):
        with pytest.raises(ValueError, match="^--rl-tool-parser auto: .* give hermes, llama3, deepseek or path"):
            make_parser("auto", tokenizer)


def test_a_users_parser_is_found_by_its_file_and_another_name_is_refused():
    assert make_parser("my.py:calls", tokenizer_of("llama3")) is None, "the pool has it"
    said = r"^--rl-tool-parser 'hermess' is unknown; give auto, hermes, llama3, deepseek or path/to/file.py:function$"
    with pytest.raises(ValueError, match=said):
        make_parser("hermess", tokenizer_of("llama3"))
