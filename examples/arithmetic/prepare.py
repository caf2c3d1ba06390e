"""Make the data of the quickstart: a tokenizer, a corpus, prompts for RL, held-out prompts.

The task is to double a number of four digits. The corpus is written by two pupils. The careful one
doubles correctly, `3827*2=7654`; the careless one forgets the carry out of the last digit,
`3827*2=7644`. The careless one wrote more of it, so a model pretrained on the corpus knows both ways
and, asked for its best guess, forgets that carry: it is right only where there is none, for the half of
the numbers that end in 0 to 4. RL with the reward "is the result right" has to find the careful way and
keep to it.

Every number belongs to one of corpus, prompts and held-out, so the held-out accuracy is about numbers
that the model was never shown. The same seed writes the same bytes.

    python examples/arithmetic/prepare.py --out runs/quickstart/data --seed 0
"""

import argparse
import json
import random
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = [chr(c) for c in range(32, 127)]
NUMBERS = range(1000, 10000)


def build_tokenizer() -> Tokenizer:
    """One token per printable ASCII character, then `<pad>` and `<eos>`: 97 ids."""
    vocabulary = {token: i for i, token in enumerate([*CHARACTERS, PAD, EOS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, EOS])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write what `transformers.AutoTokenizer` needs, in the form that its versions 4 and 5 both read."""
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": PAD, "eos_token": EOS}
    config |= {"clean_up_tokenization_spaces": False, "model_max_length": 4096}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def double(number: int) -> str:
    """The careful pupil's answer."""
    return str(2 * number)


def double_without_carry(number: int) -> str:
    """The careless pupil's answer: one ten less where the last digit carries."""
    return str(2 * number - (10 if number % 10 >= 5 else 0))


def split_numbers(rng: random.Random, prompts: int, heldout: int) -> tuple[list[int], list[int], list[int]]:
    """Numbers for the corpus, for RL and held-out, all disjoint; in each, every other one carries.

    Raises ValueError when nothing would be left for the corpus.
    """
    if prompts + heldout >= len(NUMBERS):
        raise ValueError(
            f"--prompts {prompts} and --heldout {heldout} leave nothing for the corpus: "
            f"together they must be less than {len(NUMBERS)}"
        )
    easy = [n for n in NUMBERS if n % 10 < 5]
    carrying = [n for n in NUMBERS if n % 10 >= 5]
    rng.shuffle(easy)
    rng.shuffle(carrying)
    numbers = [n for pair in zip(easy, carrying, strict=True) for n in pair]
    return numbers[prompts + heldout :], numbers[:prompts], numbers[prompts : prompts + heldout]


def write_corpus(prefix: Path, lines: list[str], tokenizer: Tokenizer, end: str = EOS) -> None:
    """Megatron's indexed dataset `prefix.bin` and `prefix.idx`: a line, and `end` behind it, is a document."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in tokenizer.encode_batch([line + end for line in lines]):
        builder.add_document(torch.tensor(document.ids), [len(document.ids)])
    builder.finalize(f"{prefix}.idx")


def write_prompts(path: Path, numbers: list[int]) -> None:
    """One `{"prompt", "answer"}` a line."""
    rows = [json.dumps({"prompt": f"{n}*2=", "answer": double(n)}) + "\n" for n in numbers]
    path.write_text("".join(rows))


def prepare(out: Path, *, seed: int, documents: int, prompts: int, heldout: int, careless: float) -> None:
    """Write `tokenizer/`, `corpus.bin`, `corpus.idx`, `prompts.jsonl` and `heldout.jsonl` into `out`."""
    rng = random.Random(seed)
    corpus_numbers, prompt_numbers, heldout_numbers = split_numbers(rng, prompts, heldout)
    lines = []
    for number in rng.choices(corpus_numbers, k=documents):
        pupil = double_without_carry if rng.random() < careless else double
        lines.append(f"{number}*2={pupil(number)}")
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    save_tokenizer(tokenizer, out / "tokenizer")
    write_corpus(out / "corpus", lines, tokenizer)
    write_prompts(out / "prompts.jsonl", prompt_numbers)
    write_prompts(out / "heldout.jsonl", heldout_numbers)
    print(f"{out}: {documents} documents, {prompts} prompts for RL, {heldout} held-out prompts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write into")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split and of the corpus")
    parser.add_argument("--documents", type=int, default=100_000, help="lines in the corpus")
    parser.add_argument("--prompts", type=int, default=512, help="prompts for RL")
    parser.add_argument("--heldout", type=int, default=256, help="prompts for the evaluation only")
    parser.add_argument("--careless", type=float, default=0.65, help="share of the corpus that forgets the carry")
    prepare(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
