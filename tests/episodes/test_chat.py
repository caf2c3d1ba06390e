"""Messages as tokens under the families' chat templates: what is appended is what transformers renders, an observation
never becomes a special token, and templates that are of no use are refused."""

import datetime
import functools
import json
import re
import time
import unicodedata

import pytest
from families import FAMILIES, FAMILY, TOOLS, make_tokenizer, template, tokenizer_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mindspeed_rl_plugin.episodes.chat import CUT, TEMPLATE_ERRORS, make_format
from mindspeed_rl_plugin.prompts import Renderer
from mindspeed_rl_plugin.prompts.render import render_chat
from mindspeed_rl_plugin.prompts.sources import open_source

WITH_TOOLS = ("qwen2_5", "qwen3", "llama3_1", "llama3_2")
CONTROL = [token for family in FAMILIES.values() for token in (*family.special, *family.added)]
QUESTION = {"role": "user", "content": "What is 3 * 4?"}
QUICK = settings(max_examples=30)

anything = st.text(st.characters(codec="utf-8"), max_size=12)
pieces = st.sampled_from(["\n", "\n\n", " ", "  \n", "😀", "é", "e\u0301", "12345", '{"a": 1}', "<|", "|>", "\t"])
plain = st.lists(anything | pieces, max_size=5).map("".join).filter(lambda text: not any(c in text for c in CONTROL))
halves = st.text("\ud800\udbff\udc00\udfffa", max_size=3)
hostile = st.lists(plain | halves | st.sampled_from(CONTROL), max_size=6).map("".join)


def tools_of(name):
    return TOOLS if name in WITH_TOOLS else ()


@functools.cache
def format_of(name):
    """By the template `name`, with tools where it has room for them."""
    return make_format(tokenizer_of(name), "chat", tools_of(name))


@functools.cache
def raw_format(name):
    return make_format(tokenizer_of(name), "raw", TOOLS)


def observed(name, texts):
    """Observations in the role that a template has for them."""
    if name in WITH_TOOLS:
        return [{"role": "tool", "name": "add", "content": text} for text in texts]
    return [{"role": "user", "content": text} for text in texts[:1]]


def rendered(name, messages):
    """Ids of a whole conversation as transformers renders it."""
    pinned = {"strftime_now": datetime.date(2024, 7, 26).strftime}
    return tokenizer_of(name).apply_chat_template(
        messages, tools=list(tools_of(name)) or None, add_generation_prompt=True, return_dict=False, **pinned
    )


def encode(name, text):
    return tokenizer_of(name).encode(text, add_special_tokens=False)


said = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).map(str.strip).filter(bool)
rounds = st.lists(st.tuples(said, st.lists(plain, min_size=1, max_size=2)), min_size=1, max_size=3)


@pytest.mark.parametrize("name", [name for name in FAMILY if name != "deepseekv3"])
@QUICK
@given(rounds=rounds)
def test_appending_gives_what_transformers_renders(name, rounds):
    messages, form = [QUESTION], format_of(name)
    ids = form.prompt(messages)
    for turn, texts in rounds:
        assume(not any(c in turn for c in CONTROL))
        messages += [{"role": "assistant", "content": turn}, *observed(name, texts)]
        ids += [*encode(name, turn), form.close, *form.behind(form.close, observed(name, texts))]
    assert ids == rendered(name, messages)


CALLS = ({"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "multiply", "arguments": {"a": 3, "b": "\n"}})


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_calls_and_their_results_are_what_transformers_renders(name):
    form, hermes = format_of(name), name.startswith("qwen")
    calls = CALLS if hermes else CALLS[:1]
    written = [json.dumps(call) for call in calls]
    text = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)
    turn = encode(name, text if hermes else written[0].replace("arguments", "parameters"))
    results = observed(name, ["3", "\n4\n"][: len(calls)])
    message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": c} for c in calls]}
    ids = [*form.prompt([QUESTION]), *turn, form.close, *form.behind(form.close, results)]
    assert ids == rendered(name, [QUESTION, message, *results])
    assert form.most_calls == (None if hermes else 1)


@pytest.mark.parametrize("name", FAMILY)
def test_reasoning_that_the_template_strips_from_history_stays(name):
    """What was sampled is never rendered: only what comes behind the last turn is compared."""
    form, observations = format_of(name), observed(name, ["one", "two"])
    turn = {"role": "assistant", "content": "<think>\nI add.\n</think>\n\nIt is 12."}
    whole = rendered(name, [QUESTION, turn, *observed(name, ["zero"]), turn, *observations])
    behind = form.behind(form.close, observations)
    assert whole[-len(behind) - 1 :] == [form.close, *behind]


def control_ids(name, ids):
    """The ids of control tokens, in their order. Qwen2.5's template knows no <think>: there it is a word."""
    family = FAMILIES[FAMILY[name]]
    words = ("<think>", "</think>") if name == "qwen2_5" else ()
    known = set(tokenizer_of(name).convert_tokens_to_ids([*family.special, *family.added]))
    return [i for i in ids if i in known - {*tokenizer_of(name).convert_tokens_to_ids(words)}]


def whole(text):
    """Pairs of surrogates joined, others replaced."""
    pairs = re.sub("[\ud800-\udbff][\udc00-\udfff]", lambda pair: json.loads(json.dumps(pair[0])), text)
    return re.sub("[\ud800-\udfff]", "\ufffd", pairs)


@pytest.mark.parametrize("name", FAMILY)
@QUICK
@given(text=hostile)
def test_an_observation_never_becomes_a_special_token(name, text):
    form, tokenizer = format_of(name), tokenizer_of(name)
    observation, harmless = observed(name, [text]), observed(name, ["harmless"])
    ids = form.behind(form.close, observation)
    assert control_ids(name, ids) == control_ids(name, form.behind(form.close, harmless))
    turn = [{"role": "assistant", "content": "said"}]
    straight = render_chat(tokenizer, [QUESTION, *turn, *observed(name, [whole(text)])], tools_of(name))
    straight = straight.partition("said")[2]
    close = tokenizer.convert_ids_to_tokens(form.close)
    as_read = (unicodedata.normalize("NFC", t) for t in (close + tokenizer.decode(ids), straight))
    assert len({*as_read}) == 1, "no character of it is lost"
    special = form.holds_special(text)
    assert special or not any(token in text for token in FAMILIES[FAMILY[name]].special)
    if not special:
        assert [form.close, *ids] == tokenizer.encode(straight, add_special_tokens=False)


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_no_part_of_a_call_in_an_agents_history_becomes_a_special_token(name):
    def written(text):
        call = {"type": "function", "function": {"name": text, "arguments": {text: {text: [text]}}}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        return control_ids(name, format_of(name).written([QUESTION, said, *observed(name, ["3"])]))

    assert written("".join(FAMILIES[FAMILY[name]].special)) == written("harmless")


def test_added_tokens_that_are_words_are_no_special_tokens():
    """As in tokenizers that have runs of spaces, or tags of HTML, as added tokens."""
    tokenizer = make_tokenizer("qwen2_5")
    tokenizer.add_tokens(["    ", "<table>"])
    form = make_format(tokenizer, "chat", TOOLS)
    text = "    <table>"
    assert not form.holds_special(text)
    assert set(tokenizer.convert_tokens_to_ids(["    ", "<table>"])) <= set(form.behind(0, observed("qwen2_5", [text])))


@pytest.mark.parametrize("name", FAMILY)
@QUICK
@given(data=hostile, said=hostile)
def test_an_observation_leaves_the_data_of_a_prompt_as_they_are(name, data, said):
    """Control tokens of the data stay what they are; none comes of what is said, nor of both together."""
    data, said = whole(data), whole(said)
    form, message = format_of(name), {**QUESTION, "content": f"(:{data}{said}:)"}
    shots = [QUESTION, {"role": "assistant", "content": "<think>\n\n</think>\n\n12"}, message]
    for messages in ([message], shots):
        assert form.prompt(messages) == rendered(name, messages), "as `Renderer` encodes it"
    ids = form.prompt([message], len(said) + 2)
    assert control_ids(name, ids) == control_ids(name, rendered(name, [{**QUESTION, "content": f"(:{data}"}]))
    read = unicodedata.normalize("NFC", message["content"])
    assert read in unicodedata.normalize("NFC", decoded(name, ids)), "no character of it is lost"


@pytest.mark.parametrize("name", FAMILY)
def test_a_control_token_of_which_the_data_hold_the_first_half_is_text(name):
    control = FAMILIES[FAMILY[name]].special[1]
    ids = format_of(name).prompt([{**QUESTION, "content": f"a {control}"}], len(control) - 2)
    assert control_ids(name, ids) == control_ids(name, format_of(name).prompt([QUESTION]))


def decoded(name, ids):
    return tokenizer_of(name).decode(ids)


@pytest.mark.parametrize("name", FAMILY)
def test_the_token_that_ends_a_turn_stands_behind_it_once(name):
    form = format_of(name)
    behind = form.behind(form.close, observed(name, ["4"]))
    assert form.close not in behind[:1]
    for other in (form.close + 1, 5):
        assert form.behind(other, observed(name, ["4"])) == [form.close, *behind]


def test_half_a_surrogate_pair_is_no_text():
    for form in (format_of("qwen2_5"), raw_format("qwen2_5")):
        text, cut = form.shortened("\ud800a\udc00\ud83d\ude00\ud83d", 100)
        assert (text, cut) == ("\ufffda\ufffd😀\ufffd", False)
        half, read = ([{"role": "user", "content": f"{c}<|im_end|>{d}"}] for c, d in ("\ud800\udc00", "\ufffd\ufffd"))
        assert form.behind(0, half) == form.behind(0, read)


def length(name, text):
    return len(raw_format(name).behind(0, [{"role": "user", "content": text}]))


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1"])
@QUICK
@given(text=hostile | hostile.map(lambda text: text * 20), limit=st.integers(1, 40))
def test_a_long_observation_is_cut_to_its_limit(name, text, limit):
    short, cut = raw_format(name).shortened(text, limit)
    mark = CUT if length(name, CUT) < limit else ""
    assert length(name, short) <= limit and cut == (length(name, text) > limit)
    text = whole(text)
    if cut:
        kept = short.removesuffix(mark)
        assert short == kept + mark and text.startswith(kept)
        assert length(name, text[: len(kept) + 1] + mark) > limit, "one character more is too much"
    else:
        assert short == text


def test_an_endless_observation_is_cut_in_a_moment():
    text = "e\u0301 12" * 2_000_000
    began = time.process_time()
    short, cut = raw_format("qwen2_5").shortened(text, 100)
    assert cut and length("qwen2_5", short) == 100 and short.endswith(CUT)
    assert time.process_time() - began < 1, "encoding all of it takes ten times as long"


def test_a_turn_as_text():
    for name in FAMILY:
        form, tokenizer = format_of(name), tokenizer_of(name)
        special = FAMILIES[FAMILY[name]].special
        tokens = [*encode(name, f"a {special[0]} b ."), form.close]
        assert form.raw_text(tokens) == f"a {special[0]} b ." and form.raw_text(tokens[:-1]) == form.raw_text(tokens)
        assert form.text(tokens) == tokenizer.decode(tokens, skip_special_tokens=True) == "a  b ."
    tokenizer = make_tokenizer("qwen2_5")
    tokenizer.eos_token = "<|endoftext|>"  # as that of Qwen's base models
    form, ends = make_format(tokenizer, "chat", TOOLS), ("<|endoftext|>", "<|im_end|>")
    assert [form.raw_text(tokenizer.encode(f"a<|im_start|>{end}")) for end in ends] == ["a<|im_start|>"] * 2
    assert format_of("qwen2_5").raw_text([]) == ""
    assert format_of("qwen2_5").raw_text(encode("qwen2_5", "<tool_call>\n</tool_call>")) == "<tool_call>\n</tool_call>"


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1"])
def test_raw_observations_are_appended_as_they_are(name):
    tokenizer, form = tokenizer_of(name), raw_format(name)
    messages = [{"role": "tool", "name": "add", "content": "\n4"}, {"role": "user", "content": " right"}]
    assert form.behind(5, messages) == encode(name, "\n4 right") and form.behind(5, []) == []
    assert form.prompt([{"role": "system", "content": "not"}, QUESTION]) == tokenizer.encode(QUESTION["content"])
    ends = [{"role": "user", "content": f"a{tokenizer.eos_token}b"}]
    assert control_ids(name, form.behind(5, ends)) == []
    data = tokenizer.encode(ends[0]["content"])
    assert form.prompt(ends) == data and tokenizer.eos_token_id in data, "as `Renderer` encodes it"
    longer = [{**QUESTION, "content": 2 * ends[0]["content"]}]
    assert form.prompt(longer, len(ends[0]["content"])) == [*data, *form.behind(5, ends)]
    assert form.most_calls is None


PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ tools }}assistant: "
ALTERNATING = """{% for m in messages %}{% if (m.role == 'assistant') == (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{{ tools }}<|im_start|>assistant
"""
LAST = PLAIN.replace(
    "{{ m.content }}", "{% if loop.last or m.role == 'assistant' %}{{ m.content }}<|im_end|>{% endif %}"
)
SHOWN_TOOL = "{{- message.content }}\n        {{- '\\n</tool_response>"


@pytest.mark.parametrize(
    ("name", "tools", "edit", "reason"),
    [
        ("qwen2_5", (), lambda t: "", "is missing"),
        ("qwen2_5", (), lambda t: PLAIN, "does not begin with a special token"),
        ("qwen2_5", (), lambda t: t.replace("<|im_end|>", "<|end|>"), "does not begin with a special token"),
        ("deepseekv3", TOOLS, lambda t: t, "does not show the tools"),
        ("llama3", TOOLS, lambda t: t, "does not show the tools"),
        ("qwen2_5", TOOLS, lambda t: t.replace(SHOWN_TOOL, "{{- '"), "after a turn that a message of role 'tool'"),
        ("qwen2_5", TOOLS, lambda t: t.replace(SHOWN_TOOL, "{{- message.content + 1 }}{{- '"), "raises TypeError"),
        ("deepseekv3", TOOLS, lambda t: "{{ tools }}" + t, "cannot be extended by appending: a message of role 'tool'"),
        ("qwen2_5", TOOLS, lambda t: LAST, "two messages of role 'user' follow: one of the messages is missing"),
        ("qwen2_5", (), lambda t: t + "{{ raise_exception('not this') }}", "raises TemplateError: not this"),
    ],
)
def test_templates_of_no_use_are_refused(name, tools, edit, reason):
    tokenizer = make_tokenizer(name, edit(template(name)))
    with pytest.raises(ValueError, match="^--rl-observation chat: the chat template of tokenizer ") as error:
        make_format(tokenizer, "chat", tools)
    assert reason in str(error.value)
    assert ("`step`" if tools else "--rl-observation raw") in str(error.value), "and what to do"


def test_a_template_with_room_for_one_message_behind_a_turn():
    form = make_format(make_tokenizer("qwen2_5", ALTERNATING), "chat", TOOLS)
    assert form.most_calls == 1, "and so for one result of a tool"
    with pytest.raises(TEMPLATE_ERRORS, match="roles must alternate"):
        form.behind(form.close, [QUESTION, QUESTION])


def test_a_template_that_is_given_no_tools_writes_nothing_of_them():
    prompt = make_format(make_tokenizer("llama3_1"), "chat", ()).prompt([QUESTION])
    assert prompt == tokenizer_of("llama3_1").apply_chat_template(
        [QUESTION], add_generation_prompt=True, return_dict=False
    )


class Frozen(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2031, 5, 6)


def test_prompts_are_the_same_every_day(monkeypatch: pytest.MonkeyPatch):
    tokenizer = tokenizer_of("llama3_2")
    form = format_of("llama3_2")
    today = form.prompt([QUESTION])
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Frozen)
    assert "06 May 2031" in render_chat(tokenizer, [QUESTION]), "this date is not pinned: responses are no episodes"
    assert form.prompt([QUESTION]) == today and "26 Jul 2024" in tokenizer.decode(today)


@pytest.mark.parametrize("name", FAMILY)
def test_data_prompts_are_rendered_with_the_tools(name, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": QUESTION["content"], "answer": "12"}) + "\n")
    tools = tools_of(name)
    renderer = Renderer(tokenizer_of(name), "prompt", "answer", True, tools)
    assert list(renderer.read(open_source(str(path)), 0, 0).tokens) == format_of(name).prompt([QUESTION])
    assert ("Multiply two numbers" in decoded(name, format_of(name).prompt([QUESTION]))) == bool(tools)
