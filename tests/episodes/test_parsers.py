"""Calls as they are read: what the templates write comes back, each attempt has a result of its own, no text breaks a
parser, and one that does not fit is refused."""

import json

import pytest
from families import make_tokenizer, template, tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl_plugin.episodes.environments import MalformedCall, ToolCall, as_declared
from mindspeed_rl_plugin.episodes.parsers import KNOWN, NO_CALL, NO_JSON, NO_LIST, NOT_CLOSED, PARSERS, make_parser
from mindspeed_rl_plugin.prompts.render import render_chat

QUICK = settings(max_examples=40, deadline=None)
WRITES = {"qwen2_5": "hermes", "qwen3": "hermes", "llama3_1": "llama3", "llama3_2": "llama3", "deepseekv3": "deepseek"}
LISTED = {"qwen3_5_nothink": "qwen3_coder", "glm4moe_training": "glm45"}  # their arguments stand between tags
ONE, TWO = ToolCall("add", {"a": 1, "b": 2}), ToolCall("search", {"for": "x"})
TAG = ToolCall("a", {"b": "\n</parameter>\n</arg_value>?</tool_call> 12"})
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


def is_json(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


listed_values = values.filter(
    lambda value: not (isinstance(value, str) and is_json(value)) and "<tool_call>" not in json.dumps(value)
)
listed_calls = st.builds(ToolCall, names, st.dictionaries(names, listed_values, max_size=3))


def made_by(parser, most):
    return st.lists(listed_calls if parser in LISTED.values() else calls, min_size=1, max_size=most)


def written(parser, call, strict=True):
    """A call as a model writes it."""
    arguments = json.dumps(call.arguments, ensure_ascii=strict)
    if parser == "hermes":
        return f'<tool_call>\n{{"name": "{call.name}", "arguments": {arguments}}}\n</tool_call>'
    if parser == "llama3":
        return f'{{"name": "{call.name}", "parameters": {arguments}}}'
    if parser in LISTED.values():
        coder = parser == "qwen3_coder"
        form = "<parameter={}>\n{}\n</parameter>\n" if coder else "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
        said = {
            key: v if isinstance(v, str) else json.dumps(v, ensure_ascii=strict) for key, v in call.arguments.items()
        }
        inside = "".join(form.format(*pair) for pair in said.items())
        inside = f"\n<function={call.name}>\n{inside}</function>\n" if coder else f"{call.name}\n{inside}"
        return f"<tool_call>{inside}</tool_call>"
    begin, sep, end = (f"<｜tool▁{name}｜>" for name in ("call▁begin", "sep", "call▁end"))
    return f"{begin}function{sep}{call.name}\n```json\n{arguments}\n```{end}"


def turn(parser, parts):
    """A turn of calls, and of texts in their place."""
    if parser == "llama3":
        return "; ".join(parts)
    inside = "\n".join(parts)
    return inside if parser != "deepseek" else f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


@pytest.mark.parametrize("name", [*WRITES, *LISTED])
@QUICK
@given(data=st.data())
def test_what_a_template_writes_is_read_by_the_parser_that_auto_chooses(name, data):
    parser = {**WRITES, **LISTED}[name]
    (call,) = data.draw(made_by(parser, 1))
    if name == "qwen3_5_nothink":  # it writes None, True and 1e-5 as Python does
        read = {key: v for key, v in call.arguments.items() if isinstance(v, (str, list, dict)) or type(v) is int}
        call = ToolCall(call.name, read)
    tokenizer = tokenizer_of(name) if name in WRITES else make_tokenizer("qwen3", template(name))
    question = {"role": "user", "content": "?"}
    arguments = json.dumps(call.arguments) if name == "deepseekv3" else call.arguments
    entry = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    whole = render_chat(tokenizer, [question, {"role": "assistant", "content": "", "tool_calls": [entry]}], ())
    said = whole.partition("<|start_header_id|>assistant<|end_header_id|>\n\n")[2] or whole.partition("?")[2]
    said = said.removeprefix("\n<|assistant|>\n<think></think>\n")
    said = said.removeprefix("<|im_end|>\n<|im_start|>assistant\n").removeprefix("<think>\n\n</think>\n\n")
    assert make_parser("auto", tokenizer)(said) == [call]
    assert make_parser("auto", tokenizer) is make_parser(parser, tokenizer)


@pytest.mark.parametrize("parser", PARSERS)
@QUICK
@given(data=st.data(), strict=st.booleans())
def test_several_calls_in_one_turn(parser, data, strict):
    made = data.draw(made_by(parser, 3))
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
    "qwen3_coder": {
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>": NO_LIST,
        "<tool_call>\n<function=add>\nand so on\n</function>\n</tool_call>": NO_LIST,
        '<tool_call>{"name": "add", "arguments": {}}</tool_call>': NO_LIST,
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>": NOT_CLOSED,
    },
    "glm45": {
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1\n</tool_call>": NO_LIST,
        "<tool_call>add(1, 2)</tool_call>": NO_LIST,
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n": NOT_CLOSED,
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
        ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", [ToolCall("now", {})]),
        ("qwen3_coder", written("qwen3_coder", TAG), [TAG]),
        ("glm45", written("glm45", TAG), [TAG]),
        ("glm45", "<tool_call>now</tool_call>", [ToolCall("now", {})]),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", [ToolCall("f", {"a": 1})]),
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
    begins = {"deepseek": "call▁begin", "llama3": "{"}.get(parser, "<tool_call>")
    assert len(attempts) <= text.count(begins) + text.count("<|python_tag|>")


def test_a_parser_whose_tokens_the_tokenizer_lacks_is_refused():
    with pytest.raises(ValueError, match="no token '<｜tool▁calls▁begin｜>', .*; give .*hermes, qwen3_coder"):
        make_parser("deepseek", tokenizer_of("qwen2_5"))
    assert make_parser("deepseek", tokenizer_of("deepseekv3")) is PARSERS["deepseek"]


def test_auto_is_refused_where_the_template_does_not_tell():
    no_calls, other_form = tokenizer_of("llama3"), make_tokenizer("qwen3", template("gptoss"))
    none = make_tokenizer("qwen3")
    none.chat_template = None
    raises = make_tokenizer("qwen3", "{{ '%(name)s' % messages[0] }}")
    for tokenizer in (no_calls, other_form, none, raises):
        with pytest.raises(ValueError, match=f"^--rl-tool-parser auto: .* give {KNOWN}$"):
            make_parser("auto", tokenizer)


def test_a_users_parser_is_found_by_its_file_and_another_name_is_refused():
    assert make_parser("my.py:calls", tokenizer_of("llama3")) is None, "the pool has it"
    assert KNOWN == "hermes, qwen3_coder, glm45, llama3, deepseek or path/to/file.py:function"
    with pytest.raises(ValueError, match=f"^--rl-tool-parser 'hermess' is unknown; give auto, {KNOWN}$"):
        make_parser("hermess", tokenizer_of("llama3"))


def test_an_argument_that_is_declared_as_a_string_is_no_number():
    kinds = {"word": {"type": "string"}, "most": {"type": "integer"}, "other": {"type": "string"}}
    tool = {"function": {"name": "look", "parameters": {"type": "object", "properties": kinds}}}
    (call,) = PARSERS["qwen3_coder"](written("qwen3_coder", ToolCall("look", {"word": 12, "most": 3})))
    assert call.arguments == {"word": 12, "most": 3}
    assert as_declared(call, [tool]).arguments == {"word": "12", "most": 3}
    for odd in ([], {}, {"properties": {"word": None}}, {"properties": 1}):
        assert as_declared(call, [{"function": {"name": "look", "parameters": odd}}]) == as_declared(call, ()) == call
