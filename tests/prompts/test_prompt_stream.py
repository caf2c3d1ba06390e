"""Prompts: every form of data, the errors a user can cause, order, cursor, tokenizer."""

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict
from small_tokenizers import make
from transformers import PreTrainedTokenizerFast

from mindspeed_rl_plugin.prompts import Offers, PromptStream, Renderer
from mindspeed_rl_plugin.prompts.tokenizer import load_tokenizer
from mindspeed_rl_plugin.reward.calling import lacking


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A character tokenizer."""
    make("words").save_pretrained(folder := tmp_path_factory.mktemp("tokenizer"))
    return folder / "tokenizer.json"


@pytest.fixture(scope="module")
def tokenizer(tokenizer_file: Path) -> PreTrainedTokenizerFast:
    return load_tokenizer(str(tokenizer_file.parent))


@pytest.fixture
def stream(tmp_path: Path, tokenizer):
    """Make a stream over files given as {name: content}, or over paths."""

    def make(files: dict | list, **options) -> PromptStream:
        paths = files
        if isinstance(files, dict):
            paths = []
            for name, content in files.items():
                data = content if isinstance(content, bytes) else content.encode()
                (tmp_path / name).write_bytes(data)
                paths.append(str(tmp_path / name))
        limits = {"max_length": 50, "seed": 1} | {k: options.pop(k) for k in ("max_length", "seed") if k in options}
        keys = {"tokenizer": tokenizer, "prompt_key": "prompt", "answer_key": "answer", "chat_template": False}
        return PromptStream(paths, Renderer(**{**keys, **options}), **limits)

    return make


def lines(*rows: dict) -> str:
    return "".join(json.dumps(r) + "\n" for r in rows)


ROWS = [{"prompt": f"p{i}", "answer": str(i), "level": i} for i in range(7)]


def served(prompts) -> list[tuple]:
    return [(p.text, p.answer, dict(p.record), p.row) for p in prompts]


def test_every_form_of_data_gives_the_same_prompts(stream, tmp_path: Path, tokenizer) -> None:
    data = Dataset.from_list(ROWS)
    data.to_parquet(str(tmp_path / "a.parquet"))
    data.save_to_disk(str(tmp_path / "saved"))
    want = [(r["prompt"], r["answer"], {"level": r["level"]}, i) for i, r in enumerate(ROWS)]
    forms = [
        {"a.jsonl": lines(*ROWS)},
        {"a.json": json.dumps(ROWS, indent=1)},
        {"b.json": lines(*ROWS)},
        {"a.jsonl": "\ufeff" + lines(*ROWS).replace("\n", "\r\n\r\n")},
        [str(tmp_path / "a.parquet")],
        [str(tmp_path / "saved")],
        {"x.jsonl": lines(*ROWS[:3]), "y.json": json.dumps(ROWS[3:])},
    ]
    for files in forms:
        made = stream(files)
        assert served(made.all()) == want, files
        assert len(made) == 7 and made.dropped == 0
    assert list(made.all()[2].tokens) == tokenizer.encode("p2") == [ord("p") - 32, ord("2") - 32]


def test_values_come_through_verbatim(stream) -> None:
    rows = [
        {"prompt": "2020-01-01", "answer": "2020-01-01", "r": None},
        {"prompt": "a", "answer": 1},
        {"prompt": "a", "answer": "007"},
        {"prompt": "a", "answer": 2.5},
        {"prompt": "a", "answer": 123456789012345678901234567890},
        {"prompt": "a", "answer": "", "x": {"y": [1, {"z": "ä"}]}},
        {"prompt": "a", "answer": [1, "x"]},
        {"prompt": "a", "answer": True},
    ]
    prompts = stream({"a.jsonl": lines(*rows)}).all()
    answers = ["2020-01-01", "1", "007", "2.5", "123456789012345678901234567890", "", '[1, "x"]', "true"]
    assert [p.answer for p in prompts] == answers
    assert prompts[0].text == "2020-01-01" and prompts[0].record == {"r": None}
    assert prompts[5].record == {"x": {"y": [1, {"z": "ä"}]}}
    assert stream({"a.jsonl": '{"prompt": "a", "x": 1}'}, answer_key="").all()[0].answer == "", "data without answers"


def test_long_prompts_are_dropped_and_counted(stream) -> None:
    rows = [{"prompt": "x" * n, "answer": ""} for n in (50, 51, 3, 99)]
    made = stream({"a.jsonl": lines(*rows)})
    assert made.dropped == 2 and [p.row for p in made.all()] == [0, 2]
    with pytest.raises(ValueError, match=r"all 4 prompts .* 2 tokens \(longest 99\)"):
        stream({"a.jsonl": lines(*rows)}, max_length=2)


def test_each_epoch_is_a_permutation_of_its_own(stream) -> None:
    made = stream({"a.jsonl": lines(*ROWS)})
    rows = [p.row for n in (5, 5, 4, 7 * 28) for p in made.next(n)]
    assert sorted(rows[:7]) == sorted(rows[7:14]) == list(range(7)) and rows[:7] != rows[7:14]
    assert set(Counter(rows).values()) == {30}


def test_order_depends_on_the_seed_alone(stream) -> None:
    def order(**options):
        return [p.row for p in stream({"a.jsonl": lines(*ROWS)}, **options).next(20)]

    assert order() == order() and order() != order(seed=2)
    # written down so that a change of the order between versions, which would break every resume, is seen
    assert order()[:7] == [4, 2, 1, 0, 6, 3, 5]


@pytest.mark.parametrize("cut", [0, 3, 7, 12])
def test_a_cursor_continues_exactly(stream, cut: int) -> None:
    whole, before, after = (stream({"a.jsonl": lines(*ROWS)}) for _ in range(3))
    expected = served(whole.next(30))[cut:]
    if cut:
        before.next(cut)
    after.load_state(json.loads(json.dumps(before.state())))
    assert served(after.next(30 - cut)) == expected
    assert after.state() == whole.state()


CHANGES = [
    ({"a.jsonl": lines(*ROWS[:-1])}, {}, "prompts was 7, now 6"),
    ({"a.jsonl": lines(*ROWS[:-1], {"prompt": "p6", "answer": "other"})}, {}, "fingerprint was"),
    ({"a.jsonl": lines(*ROWS)}, {"seed": 5}, "seed was 1, now 5"),
]


@pytest.mark.parametrize(("files", "options", "message"), CHANGES)
def test_a_cursor_into_other_data_is_refused(stream, files, options, message: str) -> None:
    state = stream({"a.jsonl": lines(*ROWS)}).state()
    with pytest.raises(ValueError, match=f"belongs to other prompts: .*{message}"):
        stream(files, **options).load_state(state)


GOOD = '{"prompt": "a", "answer": "1"}\n'
BAD_DATA = [
    ({"a.jsonl": ""}, "is empty"),
    ({"a.jsonl": "\n\n"}, "holds no rows"),
    ({"a.json": "[]"}, "holds no rows"),
    ({"a.jsonl": GOOD + "\n" + '{"prompt": "b",\n'}, "a.jsonl line 3 is not JSON"),
    ({"a.json": '[{"prompt": "b",]'}, "a.json is not JSON"),
    ({"a.json": '{"data": [{"prompt": "b"}]}'}, "holds one object; .* its field 'data' is a list"),
    ({"a.json": "3"}, "holds 3; expected a list of objects"),
    ({"a.jsonl": GOOD + "[1, 2]\n"}, r"a.jsonl line 2 is \[1, 2\], not an object"),
    ({"a.jsonl": GOOD.encode() + '{"prompt": "é"}'.encode("latin-1")}, "a.jsonl line 2 is not UTF-8"),
    ({"a.parquet": "nope"}, "a.parquet is not a Parquet file"),
    ({"a.csv": "a,b"}, "ends in '.csv'; known: .jsonl, .json, .parquet"),
    ({"a.jsonl": GOOD + '{"text": "a", "answer": "1"}'}, "line 2 has no field 'prompt'; it has 'text', 'answer'"),
    ({"a.jsonl": '{"prompt": "a", "solution": "1"}'}, "line 1 has no field 'answer'; .*set --rl-answer-key"),
    (
        {"a.jsonl": '{"prompt": null, "answer": null}'},
        r"no field 'prompt' and no 'answer'; it has 'prompt' \(null\), .*, or correct the row \(\"\" is an answer",
    ),
    ({"a.jsonl": '{"q": "a"}'}, "'prompt' and no 'answer'; it has 'q'; set --rl-prompt-key and --rl-answer-key"),
    ({"a.jsonl": '{"prompt": "", "answer": "1"}'}, "line 1: field 'prompt' gives no tokens"),
    ({"a.jsonl": '{"prompt": 3, "answer": "1"}'}, "neither a string nor a list of messages .* but '3'"),
    ({"a.jsonl": '{"prompt": [{"role": "user", "content": "x"}], "answer": ""}'}, "add --rl-apply-chat-template"),
    ({"a.jsonl": '{"prompt": "a", "answer": "\\ud800"}'}, "half of a surrogate pair"),
    ({"a.jsonl": GOOD + '{"prompt": "a", "answer": NaN}'}, "a.jsonl line 2: the answer is nan, which is no valid JSON"),
    ({"a.jsonl": '{"prompt": "a", "answer": [1, -Infinity]}'}, r"the answer is \[1, -inf\], which"),
]


@pytest.mark.parametrize(("files", "message"), BAD_DATA)
def test_bad_data_is_named(stream, files, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stream(files)


def test_directories_that_are_no_data(stream, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    with pytest.raises(ValueError, match="is no saved dataset"):
        stream([str(tmp_path / "plain")])
    DatasetDict(train=Dataset.from_list(ROWS), test=Dataset.from_list(ROWS)).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(ValueError, match="splits test, train"):
        stream([str(tmp_path / "splits")])
    assert len(stream([str(tmp_path / "splits" / "train")])) == 7


def test_names_with_dots_are_inside_objects(stream) -> None:
    """As verl's rows have it; a field whose name has the dot goes first."""
    inside = {"prompt": "a", "reward_model": {"style": "rule", "ground_truth": 7}, "x": 1}
    flat = {"prompt": "a", "reward_model.ground_truth": "8"}
    prompts = stream({"a.jsonl": lines(inside, flat, inside)}, answer_key="reward_model.ground_truth")
    first, second, _ = prompts.all()
    assert (first.answer, second.answer) == ("7", "8") and first.record["reward_model"]["ground_truth"] == 7
    kinds = {where.rpartition("/")[2]: fields for where, fields in prompts.kinds_of_rows().items()}
    assert list(prompts.answers().values()) == ["7", "8"], "of each the first row"
    assert kinds == {"a.jsonl line 1": {"reward_model", "x"}, "a.jsonl line 2": frozenset()}
    for row in (inside, {"prompt": "a", "reward_model": "b"}):
        with pytest.raises(ValueError, match="'reward_model.truth'; .* 'prompt', 'reward_model"):
            stream({"a.jsonl": lines(row)}, answer_key="reward_model.truth")
    with pytest.raises(ValueError, match="'prompt', 'reward_model.style', 'reward_model.ground_truth', 'x'"):
        stream({"a.jsonl": lines(inside)})


def offer(offers: Offers, *rows: object, seconds: float = 0.0) -> list[int]:
    return offers.add([json.dumps(row) for row in rows], seconds)


def checked(rows) -> None:
    """Of a grader that needs a level."""
    if problem := lacking(("level",), rows):
        raise ValueError(f"reward 'mine' {problem}")


def test_offered_rows_are_prompts_like_the_datas_and_wait_in_order(stream) -> None:
    data = stream({"a.jsonl": lines(*ROWS)})
    offers = Offers(data, checked, rollout=2)
    assert offer(offers, ROWS[3], ROWS[5]) == [-1, -2] and offer(offers, ROWS[1]) == [-3]
    want = {p.text: p for p in data.all()}
    taken = offers.take(2)
    assert [p.row for p in taken] == [-1, -2] and [replace(p, row=3) for p in taken[:1]] == [want["p3"]]
    assert offer(offers, ROWS[0]) == [-4], "numbers do not come again"
    assert [(p.row, p.text) for p in offers.take(9)] == [(-3, "p1"), (-4, "p0")] and offers.take(9) == []
    assert data.next(7) and data.state()["position"] == 7, "the data's cursor stays where it was"


BAD_OFFERS = [
    ({"prompt": "", "answer": "", "level": 1}, "offer: row 1: field 'prompt' gives no tokens"),
    ({"prompt": "x" * 51, "answer": "", "level": 1}, "row 1 has 51 tokens, --rl-max-prompt-length is 50; shorten"),
    ({"prompt": "a", "level": 1}, "offer: row 1 has no field 'answer'; it has 'prompt', 'level'"),
    ({"prompt": "a", "answer": ""}, "reward 'mine' has a parameter 'level', but offer: row 1 has no such field"),
    ("a", "offer: row 1 is 'a', not an object"),
    ({"prompt": "a", "answer": "???", "level": 1}, "offer: row 1: no answer"),
    ({"prompt": "a", "answer": "x" * (1 << 20), "level": 1}, "row 1 has 1048617 characters as JSON, the limit is 1048"),
]


@pytest.mark.parametrize(("row", "message"), BAD_OFFERS, ids=[message[-20:] for _, message in BAD_OFFERS])
def test_of_an_offer_with_a_bad_row_nothing_is_taken(stream, row, message: str) -> None:
    def answered(answers) -> None:
        if wrong := [where for where, answer in answers.items() if answer == "???"]:
            raise ValueError(f"{wrong[0]}: no answer")

    offers = Offers(stream({"a.jsonl": lines(*ROWS)}), checked, rollout=2, check_answers=answered)
    with pytest.raises(ValueError, match=message):
        offer(offers, ROWS[0], row)
    assert offers.take(9) == []


def test_offers_wait_for_room_and_a_checkpoint_keeps_them(stream) -> None:
    data = stream({"a.jsonl": lines(*ROWS)})
    offers = Offers(data, checked, rollout=1)  # so that four may wait
    with pytest.raises(ValueError, match=r"5 prompts at once, and at most 4 \(4 rollouts\) may wait; offer fewer"):
        offer(offers, *ROWS[:5])
    offer(offers, *ROWS[:3])
    with pytest.raises(TimeoutError, match="no room for 2 prompts within 0.01 s: 3 prompts wait, and at most 4"):
        offer(offers, *ROWS[:2], seconds=0.01)
    threading.Timer(0.1, offers.take, (1,)).start()
    began = time.monotonic()
    assert offer(offers, *ROWS[3:5], seconds=20) == [-4, -5] and time.monotonic() - began < 15
    state = json.loads(json.dumps(offers.state()))
    resumed = Offers(data, checked, rollout=1)
    resumed.load(state)
    assert [(p.row, p.text) for p in resumed.take(9)] == [(-2, "p1"), (-3, "p2"), (-4, "p3"), (-5, "p4")]
    assert offer(resumed, ROWS[0]) == [-6] and resumed.state()["taken"] == 5
    shorter = Offers(stream({"b.jsonl": lines(dict(ROWS[0], prompt="a"))}, max_length=1), checked, rollout=1)
    with pytest.raises(ValueError, match="refuses one of 4 offered prompts .* --rl-max-prompt-length is 1; .* former"):
        shorter.load(state)


def test_offers_that_come_while_a_checkpoint_is_read_are_behind_its_own(stream) -> None:
    data = stream({"a.jsonl": lines(*ROWS)})
    before = Offers(data, checked, rollout=1)
    assert offer(before, *ROWS[:4]) == [-1, -2, -3, -4] and len(before.take(1)) == 1
    resumed, numbers = Offers(data, checked, rollout=1, resumes=True), []
    with pytest.raises(TimeoutError, match=r"after 0\.01 s the job was still reading its checkpoint"):
        offer(resumed, ROWS[5], seconds=0.01)
    early = threading.Thread(target=lambda: numbers.extend(offer(resumed, *ROWS[4:6], seconds=20)))
    early.start()
    time.sleep(0.1)
    resumed.load(json.loads(json.dumps(before.state())))
    assert [(p.row, p.text) for p in resumed.take(2)] == [(-2, "p1"), (-3, "p2")]
    early.join()
    assert numbers == [-5, -6] and [p.row for p in resumed.take(9)] == [-4, -5, -6]


def test_what_a_program_offers_that_is_gone_is_not_taken(stream) -> None:
    offers = Offers(stream({"a.jsonl": lines(*ROWS)}), checked, rollout=1)
    offer(offers, *ROWS[:4])
    threading.Timer(0.1, offers.take, (4,)).start()
    with pytest.raises(EOFError):
        offers.add([json.dumps(ROWS[4])], 20.0, lambda: True)
    assert offers.take(9) == []


def test_a_run_whose_checkpoint_holds_no_offers_takes_them_from_its_first_publication_on(stream) -> None:
    offers = Offers(stream({"a.jsonl": lines(*ROWS)}), checked, rollout=1, resumes=True)
    assert offers.take(1) == [] and offer(offers, ROWS[0]) == [-1]


def test_tokenizer_forms_and_errors(tokenizer, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path / "saved")
    assert load_tokenizer(str(tmp_path / "saved")).encode("ab") == tokenizer.encode("ab")
    for name, content, message in (
        ("empty", None, "no tokenizer can be loaded from .* which holds nothing"),
        ("broken", "{", "tokenizer.json is no JSON"),
        ("other", "{}", "no tokenizer.json: it has no field 'model'"),
    ):
        (tmp_path / name).mkdir()
        if content:
            (tmp_path / name / "tokenizer.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            load_tokenizer(str(tmp_path / name))


def test_nothing_is_written_to_the_home_directory(tokenizer_file: Path, tmp_path: Path) -> None:
    """And no library that MindSpeed's patching must precede is imported with `prompts`."""
    (tmp_path / "home").mkdir()
    (tmp_path / "a.jsonl").write_text(lines(*ROWS))
    Dataset.from_list(ROWS).to_parquet(str(tmp_path / "a.parquet"))
    code = (
        "import sys; from mindspeed_rl_plugin.prompts import PromptStream, Renderer\n"
        "from mindspeed_rl_plugin.prompts.tokenizer import load_tokenizer\n"
        "assert not {'datasets', 'transformers'} & set(sys.modules)\n"
        "renderer = Renderer(load_tokenizer(sys.argv[1]), 'prompt', 'answer', False)\n"
        "s = PromptStream(sys.argv[2:], renderer, max_length=9, seed=0)\n"
        "assert len(s) == 14 and s.next(20)\n"
    )
    paths = map(str, (tokenizer_file.parent, tmp_path / "a.jsonl", tmp_path / "a.parquet"))
    command = [sys.executable, "-c", code, *paths]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "XDG_"))}
    subprocess.run(command, env={**env, "HOME": str(tmp_path / "home")}, check=True, timeout=120)
    assert list((tmp_path / "home").rglob("*")) == []
