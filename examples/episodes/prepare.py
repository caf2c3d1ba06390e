"""Make the data of two small tasks in which the model acts: a tokenizer with a chat template, a corpus of
conversations, prompts for RL, held-out prompts.

**calculator**: multiply two numbers of two digits. Most pupils who wrote the corpus guess, `=2817`; some ask the tool
`multiply` and copy its result; some of these ask it with a wrong number. Where no tools are offered, all guess. A model
pretrained on the corpus guesses when asked for its best answer, and a guess is almost never right.

**guess**: find a number from 0 to 31 in five turns; the other side answers `higher` or `lower`. Most pupils count up
from 0; the others halve what is left, but not exactly.

    python examples/episodes/prepare.py --task calculator --out runs/episodes/data --seed 0
"""

import argparse
import functools
import json
import random
import sys
from pathlib import Path

from jinja2 import Template
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "arithmetic"))
from prepare import write_corpus  # noqa: E402

PAD, START, END = "<pad>", "<|im_start|>", "<|im_end|>"
CALL = ("<tool_call>", "</tool_call>")
TEMPLATE = (
    "{%- if tools %}<|im_start|>system\nTools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>\n"
    "{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "multiply"}}  # the template shows no more of it
TOP, TURNS = 31, 5

Message = dict[str, str]


def multiply(rng: random.Random, a: int, b: int, tools: bool) -> list[Message]:
    """One pupil's conversation about a * b."""
    messages = [{"role": "user", "content": f"{a}*{b}"}]
    if not tools or rng.random() < 0.6:
        return [*messages, {"role": "assistant", "content": f"={rng.randrange(100, 10000)}"}]
    given = (a, b) if rng.random() < 0.7 else (rng.randrange(10, 100), b)
    call = json.dumps({"name": "multiply", "arguments": {"a": given[0], "b": given[1]}})
    result = str(given[0] * given[1])
    return [
        *messages,
        {"role": "assistant", "content": f"{CALL[0]}{call}{CALL[1]}"},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": f"={result}"},
    ]


def guess(rng: random.Random, number: int) -> list[Message]:
    """One pupil's game."""
    counts, low, high = rng.random() < 0.6, 0, TOP
    messages = [{"role": "user", "content": f"0 to {TOP}"}]
    for _ in range(TURNS):
        most = (high - low) / 8  # from the middle
        said = low if counts else round((low + high) / 2 + rng.triangular(-most, most))
        messages.append({"role": "assistant", "content": str(said)})
        if said == number:
            return [*messages, {"role": "user", "content": "right"}]
        messages.append({"role": "user", "content": "higher" if said < number else "lower"})
        low, high = (said + 1, high) if said < number else (low, said - 1)
    return messages


def build_tokenizer(texts: list[str], size: int = 320) -> Tokenizer:
    """Byte pairs of the conversations; each digit is a token."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[PAD, START, END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in CALL])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write what `transformers.AutoTokenizer` needs, the chat template included."""
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": PAD, "eos_token": END}
    config |= {"clean_up_tokenization_spaces": False, "model_max_length": 4096, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def rendered(messages: list[Message], tools: bool) -> str:
    """The text of a conversation, by the template."""
    return _template().render(messages=messages, tools=[TOOL] if tools else None)


@functools.cache
def _template() -> Template:
    return Template(TEMPLATE)


def calculator_texts(rng: random.Random, documents: int, rows: int) -> tuple[list[str], list[dict], list[dict]]:
    """Conversations, prompts and held-out prompts; these three share no product."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(pairs)
    prompts = [{"prompt": f"{a}*{b}", "answer": f"={a * b}"} for a, b in pairs[: 2 * rows]]
    texts = []
    for a, b in rng.choices(pairs[2 * rows :], k=documents):
        tools = rng.random() < 0.8
        texts.append(rendered(multiply(rng, a, b, tools), tools))
    return texts, prompts[:rows], prompts[rows:]


def guess_texts(rng: random.Random, documents: int, rows: int) -> tuple[list[str], list[dict], list[dict]]:
    """The same; of the games each number is one, and the held-out ones are played with each number."""
    texts = [rendered(guess(rng, rng.randint(0, TOP)), False) for _ in range(documents)]
    games = [{"prompt": f"0 to {TOP}", "answer": str(number)} for number in range(TOP + 1)]
    return texts, [games[i % len(games)] for i in range(rows)], games


TASKS = {"calculator": calculator_texts, "guess": guess_texts}


def prepare(out: Path, *, task: str, seed: int, documents: int, rows: int) -> None:
    """Write `tokenizer/`, `corpus.bin`, `corpus.idx`, `prompts.jsonl` and `heldout.jsonl` into `out`."""
    texts, prompts, heldout = TASKS[task](random.Random(seed), documents, rows)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(texts[:5000])
    save_tokenizer(tokenizer, out / "tokenizer")
    write_corpus(out / "corpus", texts, tokenizer, end="")
    for name, lines in (("prompts", prompts), ("heldout", heldout)):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    print(f"{out}: {documents} conversations, {len(prompts)} prompts for RL, {len(heldout)} held-out prompts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--task", choices=tuple(TASKS), required=True)
    parser.add_argument("--out", type=Path, required=True, help="directory to write into")
    parser.add_argument("--seed", type=int, default=0, help="seed of the corpus and of the prompts")
    parser.add_argument("--documents", type=int, default=60_000, help="conversations in the corpus")
    parser.add_argument("--rows", type=int, default=256, help="prompts for RL, and held-out ones")
    prepare(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
