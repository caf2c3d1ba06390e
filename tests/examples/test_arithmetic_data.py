"""The data of the quickstart: determinism, no leak between the splits, a tokenizer and a dataset that load."""

import json
import random
from pathlib import Path

import pytest
from commands import ended, imported

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "arithmetic" / "prepare.py"
FILES = (
    "corpus.bin",
    "corpus.idx",
    "prompts.jsonl",
    "heldout.jsonl",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
)

# Megatron is imported in a process of its own: tests of host mode need a process without it.
PREPARE = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from prepare import prepare
from megatron.core.datasets.indexed_dataset import IndexedDataset
for out, seed in (("a", 0), ("b", 0), ("c", 1)):
    prepare(Path(sys.argv[2]) / out, seed=seed, documents=2000, prompts=512, heldout=256, careless=0.65)
dataset = IndexedDataset(sys.argv[2] + "/a/corpus")
assert len(dataset.document_indices) == 2001
print(json.dumps([row.tolist() for row in dataset]))
"""


@pytest.fixture(scope="module")
def prepare():
    return imported(SCRIPT)


@pytest.fixture(scope="module")
def data(tmp_path_factory, warm_python):
    """Directory with a, b (seed 0) and c (seed 1), and the token rows of a's corpus."""
    out = tmp_path_factory.mktemp("arithmetic")
    result = ended(warm_python, "-c", PREPARE, SCRIPT.parent, out)
    return out, json.loads(result.stdout.splitlines()[-1])


def numbers(path: Path) -> list[int]:
    return [int(json.loads(line)["prompt"].split("*")[0]) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def lines(data, prepare):
    tokenizer = prepare.build_tokenizer()
    return [tokenizer.decode(row, skip_special_tokens=False) for row in data[1]]


def test_same_seed_same_bytes_another_seed_another_split(data):
    out, _ = data
    for name in FILES:
        assert (out / "a" / name).read_bytes() == (out / "b" / name).read_bytes(), name
    for name in ("corpus.bin", "prompts.jsonl", "heldout.jsonl"):
        assert (out / "a" / name).read_bytes() != (out / "c" / name).read_bytes(), name


def test_no_number_is_in_two_of_corpus_prompts_and_heldout(data, lines):
    out, _ = data
    prompts, heldout = numbers(out / "a/prompts.jsonl"), numbers(out / "a/heldout.jsonl")
    corpus = {int(line.split("*")[0]) for line in lines}
    assert (len(prompts), len(heldout)) == (512, 256)
    assert len(set(prompts) | set(heldout)) == 512 + 256
    assert corpus.isdisjoint(prompts) and corpus.isdisjoint(heldout)
    assert len(corpus) > 1500


def test_answers_are_right_and_half_of_the_prompts_carry(data):
    for name, count in (("prompts", 512), ("heldout", 256)):
        rows = [json.loads(line) for line in (data[0] / f"a/{name}.jsonl").read_text().splitlines()]
        assert all(int(r["answer"]) == 2 * int(r["prompt"].removesuffix("*2=")) for r in rows)
        assert sum(n % 10 >= 5 for n in numbers(data[0] / f"a/{name}.jsonl")) == count // 2


def test_corpus_lines_are_one_of_the_two_pupils(lines):
    careless = carrying = 0
    for line in lines:
        assert line.endswith("<eos>")
        number, answer = (int(x) for x in line.removesuffix("<eos>").split("*2="))
        if number % 10 < 5:
            assert answer == 2 * number
            continue
        carrying += 1
        careless += answer == 2 * number - 10
        assert answer in (2 * number, 2 * number - 10)
    assert 0.60 < careless / carrying < 0.70


@pytest.mark.parametrize(
    ("number", "careful", "careless"),
    [(3827, "7654", "7644"), (1234, "2468", "2468"), (5555, "11110", "11100"), (1005, "2010", "2000")],
)
def test_the_two_pupils(prepare, number, careful, careless):
    assert (prepare.double(number), prepare.double_without_carry(number)) == (careful, careless)


def test_tokenizer_is_characters_and_loads_with_transformers(data):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(data[0] / "a/tokenizer")
    assert len(tokenizer) == 97
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<pad>", "<eos>")
    ids = tokenizer.encode("3827*2=")
    assert len(ids) == 7
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "3827*2="
    text = "".join(chr(c) for c in range(32, 127))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_too_many_prompts_leave_no_corpus(prepare):
    with pytest.raises(ValueError, match="--prompts 8000 .*--heldout 1000 .* 9000"):
        prepare.split_numbers(random.Random(0), 8000, 1000)
