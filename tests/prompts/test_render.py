"""A row as tokens: what transformers makes of it, and the rows that need a repair or are refused."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError

from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.config.run_flags import DataConfig, RolloutConfig
from mindspeed_rl_plugin.environment import say
from mindspeed_rl_plugin.launch.read_inputs import _ends, _stream
from mindspeed_rl_plugin.loop.inputs import Inputs
from mindspeed_rl_plugin.prompts import PairRenderer, PairStream, PromptStream, Renderer
from mindspeed_rl_plugin.prompts.ends import end_of_turn, response_ends
from mindspeed_rl_plugin.prompts.render import is_rendered
from mindspeed_rl_plugin.prompts.sources import Source

sys.path.insert(0, str(Path(__file__).parent))
from small_tokenizers import ALPHABET, BOS, ENDS, EOS, GLM, KINDS, TEMPLATES, make  # noqa: E402

pytestmark = pytest.mark.quick

FIXED = settings(derandomize=True, deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
TEXTS = st.text(st.sampled_from([*ALPHABET, "a", "b", "1", "=", " ", "\n"]), min_size=1, max_size=12)
CONTENTS = TEXTS.filter(str.strip)
ADDS = st.sampled_from(["", "b", "e", "be"])
KEYS = {"chosen": "chosen", "rejected": "rejected"}


@st.composite
def conversations(draw):
    """Chat messages that end with the user's."""
    turns = draw(st.integers(0, 2))
    roles = ["system"] * draw(st.integers(0, 1)) + ["user", "assistant"] * turns + ["user"]
    return [{"role": role, "content": draw(CONTENTS)} for role in roles]


def source(*rows: dict, fills: bool = False) -> Source:
    return Source("x", len(rows), rows.__getitem__, lambda i: f"line {i + 1}", fills)


def prompt_of(tokenizer, row: dict, chat: bool = True, fills: bool = False):
    return Renderer(tokenizer, "prompt", "", chat).read(source(row, fills=fills), 0, 0)


def pair_of(tokenizer, row: dict, chat: bool = True, fills: bool = False):
    return PairRenderer(tokenizer, "prompt", KEYS, chat).read(source(row, fills=fills), 0, 0)


def chat_of(tokenizer, messages, ask=False) -> list[int]:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=ask, return_dict=False)


@FIXED
@given(st.sampled_from(KINDS), st.sampled_from([*TEMPLATES]), ADDS, conversations(), CONTENTS, CONTENTS)
def test_what_is_rendered_is_what_transformers_renders(kind, name, adds, messages, chosen, rejected) -> None:
    tokenizer = make(kind, name, adds)
    row = {"prompt": messages, "chosen": chosen, "rejected": rejected}
    try:
        wanted = chat_of(tokenizer, messages, ask=True)
    except TemplateError:
        with pytest.raises(ValueError, match="line 1: the chat template refuses these messages: no system role"):
            prompt_of(tokenizer, row)
        return
    prompt = prompt_of(tokenizer, row)
    assert list(prompt.tokens) == wanted and prompt.messages == messages
    assert prompt.text == "\n\n".join(f"{m['role']}: {m['content']}" for m in messages)
    assume(chosen != rejected)
    pair = pair_of(tokenizer, row)
    for answer, said in ((pair.chosen, chosen), (pair.rejected, rejected)):
        conversation = [*messages, {"role": "assistant", "content": said}]
        assert [*pair.prompt, *answer] == chat_of(tokenizer, conversation)
        ends = [token for token in answer if token == tokenizer.convert_tokens_to_ids(ENDS[name])]
        assert len(ends) == 1 and answer[-3:].count(ends[0]) == 1, "one end, and it is the answer's"
        if not kind.startswith("metaspace"):  # whose decoder drops a space behind a special token
            text = tokenizer.apply_chat_template(conversation, tokenize=False)
            assert tokenizer.decode([*pair.prompt, *answer]) == text


@FIXED
@given(st.sampled_from(KINDS), ADDS, st.booleans(), TEXTS, CONTENTS, CONTENTS)
def test_plain_texts_have_special_tokens_once_and_pairs_are_one_text(kind, adds, begun, text, chosen, rejected) -> None:
    tokenizer = make(kind, None, adds)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id

    def whole(said: str) -> tuple[int, ...]:
        tokens = tokenizer.encode(BOS * begun + text + said, add_special_tokens=False)
        return (*[bos] * ("b" in adds and not begun), *tokens)

    row = {"prompt": BOS * begun + text, "chosen": chosen, "rejected": rejected}
    assert prompt_of(tokenizer, row, chat=False).tokens == whole("")
    if whole("")[0] not in whole(chosen)[:1] or whole("")[0] not in whole(rejected)[:1]:
        with pytest.raises(ValueError, match="line 1: the prompt has no token of its own"):
            pair_of(tokenizer, row, chat=False)
        return
    pair = pair_of(tokenizer, row, chat=False)
    assert (pair.prompt + pair.chosen, pair.prompt + pair.rejected) == ((*whole(chosen), eos), (*whole(rejected), eos))
    own = len(pair.prompt)
    assert pair.prompt == whole("")[:own]
    assert own == len(whole("")) or {pair.chosen[0], pair.rejected[0]} != {whole("")[own]}, "no token more"
    if kind == "words":  # nothing merges
        assert (pair.prompt, pair.chosen) == (whole(""), (*tokenizer.encode(chosen, add_special_tokens=False), eos))


USER = {"role": "user", "content": "1+1="}
PARTS = {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1=", "image": None}]}
NULLS = {**USER, "name": None, "tool_calls": None}


@pytest.mark.parametrize("message", [PARTS, NULLS])
@pytest.mark.parametrize("template", ["chatml", "{% for m in messages %}{{ m }}{% endfor %}"])
def test_contents_have_one_form(template, message, capsys) -> None:
    tokenizer, answers = make("words", template), {"chosen": "2", "rejected": "3"}
    listed = [{"role": "assistant", "content": [{"type": "text", "text": "2"}], "name": None}]
    got, plain = (prompt_of(tokenizer, {"prompt": [m]}) for m in (message, USER))
    assert got == plain and got.text == "user: 1+1="
    alone = prompt_of(tokenizer, {"prompt": "1+1="})
    assert (alone.tokens, alone.text, alone.messages) == (plain.tokens, "1+1=", None)
    joined = "parts of a message's content are joined (x line 1: field 'prompt'" in capsys.readouterr().out
    assert joined == ("name" not in message)
    row = {**answers, "prompt": [message], "chosen": listed}
    assert pair_of(tokenizer, row) == pair_of(tokenizer, {**answers, "prompt": [USER]})


def test_parquet_rows_are_as_those_of_jsonl(tmp_path: Path) -> None:
    calls = ([{"function": {"name": "add", "arguments": {key: 1}}}] for key in "ab")
    asked = [[{"role": "assistant", "content": None, "tool_calls": call}, USER] for call in calls]
    answers = {key: [{"role": "assistant", "content": key}] for key in KEYS}
    rows = [{"prompt": messages, **answers} for messages in (*asked, [{**USER, "name": "n"}])]
    as_openai = json.dumps(rows[1]).replace('"content": null, ', "")
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps(rows[0]), as_openai, json.dumps(rows[2])]))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    uses = "{% for m in messages %}{{ m.content }}{% for k in m if k != 'content' %}{{ m[k] }}{% endfor %}{% endfor %}"
    tokenizer, most = make("words", uses), {"max_length": 999, "seed": 0}
    paths = [str(tmp_path / f"a.{form}") for form in ("jsonl", "parquet")]
    renderer, pairs = Renderer(tokenizer, "prompt", "", True), PairRenderer(tokenizer, "prompt", KEYS, True)
    one, two = (PairStream([path], pairs, max_response=99, **most).all() for path in paths)
    assert len(one) == 3 and one == two
    one, two = ([(p.tokens, p.text, p.messages) for p in PromptStream([f], renderer, **most).all()] for f in paths)
    assert one == two and one[0][1] == "assistant: \n\nuser: 1+1=" and one[2][2] == rows[2]["prompt"]


REFUSED = [
    ([{**USER, "content": [{"type": "image", "text": "x"}]}], "role 'user' with the content .*'image'.* give a string"),
    ([{**USER, "content": []}], r"message of role 'user' with the content '\[\]'.* give a string"),
    ([{"role": "assistant", "name": "n"}, USER], "nor a list of messages with 'role' and 'content'"),
    ([{**USER, "content": 7}], "message of role 'user' with the content '7'"),
    ([{**USER, "content": None}], "message of role 'user' with the content 'None'"),
    ([{"role": "assistant", "content": None, "name": "n"}, USER], "role 'assistant' with the content 'None'"),
    ([{"role": None, "content": "x"}], "nor a list of messages with 'role' and 'content'"),
    ([USER, {"role": "assistant", "content": "2"}], "'prompt' is the assistant's, '2', .* continue_final"),
    ("1\ud800=", r"holds half of a surrogate pair, the end of .*prompt.*\\ud800'; correct or remove"),
]


@pytest.mark.parametrize(("prompt", "message"), REFUSED, ids=[m[-20:] for _, m in REFUSED])
@pytest.mark.parametrize("of", [prompt_of, pair_of])
def test_prompts_that_are_refused(of, prompt, message) -> None:
    with pytest.raises(ValueError, match=f"x line 1.*{message}"):
        of(make("words", "chatml"), {"prompt": prompt, "chosen": "2", "rejected": "3"})


def test_answers_have_one_end(capsys) -> None:
    for tokenizer, chat, ends in (
        (make("words"), False, ["</s>", "</s></s>\n"]),
        (make("bytes", "chatml"), True, ["<|im_end|>", "<|im_end|>\n", "</s>"]),
    ):
        row = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
        for end in ends:
            assert pair_of(tokenizer, {**row, "chosen": f"2{end}"}, chat) == pair_of(tokenizer, row, chat)
            assert "note: an answer ends with '<" in capsys.readouterr().out
            with pytest.raises(ValueError, match=r"line 1: field 'rejected' holds .* ends a response, before .* no 4'"):
                pair_of(tokenizer, {**row, "rejected": f"3{end.strip()} no 4"}, chat)
    tokenizer = make("words", GLM)
    pair = pair_of(tokenizer, {**row, "chosen": "2</s>", "rejected": "3</s>\n"})
    assert [tokenizer.decode(tokens) for tokens in (pair.chosen, pair.rejected)] == ["2</s>", "3</s>"]
    assert "no end is trained" not in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "llama2"])  # which has no tokens of its own
def test_strings_that_are_rendered_already_have_the_ends_of_the_template(name, capsys) -> None:
    tokenizer = make("words", name)
    prompt, end = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True), ENDS[name]
    pair = pair_of(tokenizer, {"prompt": prompt, "chosen": f"2{end}", "rejected": "3"}, chat=False)
    assert [tokenizer.decode(tokens) for tokens in (pair.chosen, pair.rejected)] == [f"2{end}", f"3{end}"]
    assert is_rendered(tokenizer, prompt) and "without the tokenizer's chat template" not in capsys.readouterr().out
    assert not is_rendered(tokenizer, f"{BOS}1{EOS}<think>") and not is_rendered(make("words"), prompt)
    pair = pair_of(tokenizer, {"prompt": f"1{EOS}", "chosen": "2", "rejected": "3"}, chat=False)
    assert tokenizer.decode(pair.chosen) == f"2{EOS}"


def test_what_a_template_drops_of_an_answer_is_trained_and_said(capsys) -> None:
    tokenizer = make("bytes", "deepseek")
    pair = pair_of(tokenizer, {"prompt": "1+1=", "chosen": "good</think>2", "rejected": "bad</think>3"})
    said = [tokenizer.decode(tokens) for tokens in (pair.prompt, pair.chosen, pair.rejected)]
    assert said == ["<s><｜User｜>1+1=<｜Assistant｜>", "good</think>2</s>", "bad</think>3</s>"]
    assert "drops some of an answer, 'good</think>2'; trained as 'good</think>2</s>' (x" in capsys.readouterr().out
    rows = [{"prompt": "1", "chosen": f"I{i}'ll</think>2", "rejected": f"it's{i}</think>3"} for i in range(4)]
    renderer = PairRenderer(tokenizer, "prompt", KEYS, True)
    assert len([renderer.read(source(*rows), index, index) for index in range(4)]) == 4
    assert capsys.readouterr().out.count("drops some of an answer") == 1, "said once, whatever the text"
    thinks = make("bytes", TEMPLATES["chatml"].replace("assistant\n{%", "assistant\n<think>\n{%"))
    pair = pair_of(thinks, {"prompt": "1", "chosen": "<think>\na</think>2", "rejected": "<think>\nb</think>3"})
    assert thinks.decode(pair.chosen) == "a</think>2<|im_end|>\n" and capsys.readouterr().out == ""
    pair_of(make("bytes", TEMPLATES["chatml"].replace("m.content", "m.content | upper")), rows[0])
    out = capsys.readouterr().out
    assert 'changes an answer, "I0\'ll</think>2"; trained as "I0\'LL</THINK>2<' in out and "drops" not in out
    pair_of(make("words", GLM), {"prompt": "1", "chosen": "2", "rejected": "3"})
    assert "writes no special token after an answer, so no end is trained" in capsys.readouterr().out


def test_a_template_that_drops_what_is_asked_is_said(capsys) -> None:
    tokenizer = make("words", "{% for m in messages %}{{ m.content if m.content is not string }}{% endfor %}?")
    prompt_of(tokenizer, {"prompt": "1+1="})
    assert "note: the chat template does not write all of a message, '1+1=' (x line 1" in capsys.readouterr().out
    with pytest.raises(ValueError, match="has no chat template"):
        prompt_of(make("words"), {"prompt": "1"})
    prompt_of(make("words", "chatml"), {"prompt": "1"}, chat=False)
    assert "prompts are given without the tokenizer's chat template (--rl-apply" in capsys.readouterr().out
    prompt_of(make("words", "chatml"), {"prompt": "<|im_start|>user\n1"}, chat=False)
    assert capsys.readouterr().out == ""
    prompt_of(make("words", "chatml"), {"prompt": "<|im_start|>user\n1+1="})
    assert "holds special tokens; is it rendered already?" in capsys.readouterr().out


def test_a_response_to_an_empty_prompt_begins_behind_bos(capsys) -> None:
    row = {"prompt": "", "chosen": "2", "rejected": "3"}
    for adds in ("b", "be"):
        tokenizer = make("words", None, adds)
        pair, prompt = (of(tokenizer, row, chat=False) for of in (pair_of, prompt_of))
        assert prompt.tokens == pair.prompt == (tokenizer.bos_token_id,)
        assert ("puts '</s>' after a text" in capsys.readouterr().out) == (adds == "be")


def test_where_tokens_merge_the_loss_begins_with_the_merged_one(capsys) -> None:
    """Of both answers, for the prompt is that of both."""
    tokenizer = make("metaspace")
    pair = pair_of(tokenizer, {"prompt": "b=", "chosen": "12", "rejected": "2"}, chat=False)
    as_tokens = [tokenizer.convert_ids_to_tokens(tokens) for tokens in (pair.prompt, pair.chosen, pair.rejected)]
    assert as_tokens == [["▁", "b"], ["=1", "2", EOS], ["=", "2", EOS]]
    assert "tokens of prompt and answer merge: '=' of the prompt is trained with the answer" in capsys.readouterr().out
    with pytest.raises(ValueError, match="line 1: the prompt has no token of its own"):
        pair_of(make("metaspace-bare"), {"prompt": "a", "chosen": "b", "rejected": "c"}, chat=False)


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_a_turn_is_the_templates(kind) -> None:
    assert {name: end_of_turn(make(kind, name)) for name in TEMPLATES} == ENDS
    assert end_of_turn(make(kind, TEMPLATES["chatml"].replace("m.content", "m.content | upper"))) == "<|im_end|>"
    assert end_of_turn(make(kind, TEMPLATES["chatml"].replace("m.content", "''"))) is None
    assert end_of_turn(make(kind, GLM)) is None and end_of_turn(make(kind, "{{ messages[1].x.y }}")) is None


@pytest.mark.parametrize(
    ("listed", "chat", "ends"),
    [
        (None, False, {EOS: "tokenizer"}),
        (None, True, {EOS: "tokenizer", "<|im_end|>": "chat template"}),
        (EOS, False, {EOS: "tokenizer, generation_config.json"}),
        (["<|eot_id|>", "<|im_end|>"], True, {EOS: "tokenizer", "<|im_end|>": "chat template, generation_config.json"}),
    ],
)
def test_whatever_ends_a_turn_ends_a_response(tmp_path: Path, listed, chat, ends) -> None:
    tokenizer = make("words", "chatml")
    id_of, vocab = tokenizer.convert_tokens_to_ids, len(tokenizer)
    if listed:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": id_of(listed)}))
        ends = ends | ({"<|eot_id|>": "generation_config.json"} if "<|eot_id|>" in listed else {})
    found = response_ends(tokenizer, chat, str(tmp_path), vocab)
    assert found == {id_of(token): source for token, source in ends.items()} and [*found][0] == id_of(EOS)
    for wrong in (vocab, -1, "1"):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, wrong]}))
        with pytest.raises(ValueError, match=f"eos_token_id {wrong!r} of .*/generation_config.json is no id below"):
            response_ends(tokenizer, chat, str(tmp_path), vocab)
    with pytest.raises(ValueError, match="eos_token_id .* of the tokenizer '' is no id below"):
        response_ends(tokenizer, chat, None, id_of(EOS))


def chat(*texts: str) -> list[dict]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


ASK, ANSWER, GO = r"<|im_start|>user\n", r"<|im_start|>assistant\n", r"\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("kind", "template", "row", "line"),
    [
        (
            "bytes",
            "chatml",
            {"prompt": chat("1*end* '2'", 'é"', "3</s>4")},
            rf"""prompt "{ASK}1*end* '2'<|im_end|>" *end* '\n{ANSWER}é"<|im_end|>' *end* '\n{ASK}3</s>' *end* """
            rf"""'4<|im_end|>' *end* '{GO}' *response begins*""",
        ),
        ("bytes", GLM, {"prompt": "1"}, r"prompt '<|user|>\n1<|assistant|>\n' *response begins*"),
        ("metaspace", None, {"prompt": "a </s> b"}, "prompt 'a </s>' *end* ' b' *response begins*"),
        ("words", None, {"prompt": ".<|im_end|>"}, "prompt '.' *end* '<|im_end|>' *response begins*"),
        (
            "words",
            "chatml",
            {"prompt": "<|im_start|>1<|im_end|>", "chosen": "2", "rejected": "3"},
            "prompt '<|im_start|>1<|im_end|>' *end*, chosen *loss begins* '2<|im_end|>' *end* *loss ends*, "
            "rejected *loss begins* '3<|im_end|>' *end* *loss ends*",
        ),
        (
            "bytes",
            "chatml",
            {"prompt": chat("1", "2", "3" * 999)},
            rf"prompt '{ASK}1<|im_end|>' *end* '\n{ANSWER}2<|im_end|>' *end* '\n{ASK}{'3' * 118}' ... "
            rf"'{'3' * 166}<|im_end|>' *end* '{GO}' *response begins*",
        ),
        (
            "bytes",
            "chatml",
            {"prompt": chat("1", "2", "3"), "chosen": "4", "rejected": "5" * 999},
            rf"prompt '{ASK}1<|im_end|>' *end* '\n{ANSWER}2<|im_end|>' *end* '\n{ASK}3<|im_end|>' *end* '{GO}', "
            r"chosen *loss begins* '4<|im_end|>' *end* '\n' *loss ends*, "
            rf"rejected *loss begins* '{'5' * 200}' ... '{'5' * 188}<|im_end|>' *end* '\n' *loss ends*",
        ),
        (
            "metaspace",
            None,
            {"prompt": "a", "chosen": " b", "rejected": " c"},
            "prompt 'a', chosen *loss begins* ' b</s>' *end* *loss ends*, "
            "rejected *loss begins* ' c</s>' *end* *loss ends*",
        ),
    ],
)
def test_the_first_row_is_shown_with_its_ends(tmp_path: Path, capsys, kind, template, row, line) -> None:
    """Of training and of held-out data; `.` is a stop token of the run."""
    tokenizer, paths = make(kind, template), [str(tmp_path / name) for name in ("a.jsonl", "held-out.jsonl")]
    for path in paths:
        Path(path).write_text("\n".join(map(json.dumps, ({**row, "prompt": "1" * 2000}, row))))
    data = DataConfig(
        apply_chat_template=bool(template) and "<|" not in row["prompt"], answer_key="", max_prompt_length=1500
    )
    sampling = RolloutConfig(stop_token_ids=tuple(tokenizer.encode(".")[-1:]), max_response_length=1500)
    config = RLConfig(data=data, rollout=sampling)
    streams = [_stream(tokenizer, config, "chosen" in row, None, [path], 0) for path in paths]
    _ends(config, tokenizer, len(tokenizer), None, *streams)
    shown = [text for text in capsys.readouterr().out.splitlines() if text.startswith("[rl] the first, ")]
    assert shown == [f"[rl] the first, {path} line 2: {line}" for path in paths]


def test_graders_do_not_see_what_ended_a_response() -> None:
    """Not each end is marked special."""
    tokenizer = make("words")
    job = SimpleNamespace(tokenizer=tokenizer, end_tokens=tuple(tokenizer.encode(".")))
    assert [Inputs.decode(job, tokenizer.encode(said)) for said in ("1.2.", "1.2", "")] == ["1.2", "1.2", ""]


def test_a_row_is_shown_on_any_terminal(monkeypatch) -> None:
    terminal = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(terminal, encoding="ascii"))
    say("prompt '中'")
    assert terminal.getvalue() == b"[rl] prompt '\\u4e2d'\n"
