"""Make the data of the quickstart: a tokenizer, a corpus of sums, prompts for RL, held-out prompts.

The corpus is written by two pupils. The careful one adds correctly; the careless one adds every column
and forgets each carry, `67+58=15` instead of `67+58=125`. The careless one wrote more of it, so a model
pretrained on the corpus knows both ways and, asked for its best guess, mostly forgets the carry. RL
with the reward "is the sum right" has to find and keep the careful way.

Every unordered pair of numbers belongs to one of corpus, prompts and held-out, so neither `67+58` nor
`58+67` is ever seen in two of them. The same seed writes the same bytes.

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
SMALLEST, LARGEST = 10, 99

Pair = tuple[int, int]


def build_tokenizer() -> Tokenizer:
    """One token a printable ASCII character, then `<pad>` and `<eos>`: 97 ids."""
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


def add_without_carry(a: int, b: int) -> int:
    """Sum of each column modulo ten: the careless pupil's answer."""
    total, place = 0, 1
    while a or b:
        total += (a % 10 + b % 10) % 10 * place
        a, b, place = a // 10, b // 10, place * 10
    return total


def split_pairs(rng: random.Random, prompts: int, heldout: int) -> tuple[list[Pair], list[Pair], list[Pair]]:
    """Ordered pairs for the corpus, for RL and held-out; `a+b` and `b+a` are always on the same side."""
    numbers = range(SMALLEST, LARGEST + 1)
    unordered = [(a, b) for a in numbers for b in numbers if a <= b]
    rng.shuffle(unordered)
    if prompts + heldout >= len(unordered):
        raise ValueError(
            f"--prompts {prompts} and --heldout {heldout} leave no pair for the corpus: there are {len(unordered)} pairs"
        )
    shown = [(a, b) if rng.random() < 0.5 else (b, a) for a, b in unordered[: prompts + heldout]]
    corpus = [pair for a, b in unordered[prompts + heldout :] for pair in {(a, b), (b, a)}]
    return sorted(corpus), shown[:prompts], shown[prompts:]


def write_corpus(
    prefix: Path, pairs: list[Pair], documents: int, careless: float, tokenizer: Tokenizer, rng: random.Random
) -> None:
    """Megatron's indexed dataset `prefix.bin` and `prefix.idx`, one sum and `<eos>` a document."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    sums = [
        f"{a}+{b}={add_without_carry(a, b) if rng.random() < careless else a + b}{EOS}"
        for a, b in rng.choices(pairs, k=documents)
    ]
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for line in tokenizer.encode_batch_fast(sums):
        builder.add_document(torch.tensor(line.ids), [len(line.ids)])
    builder.finalize(f"{prefix}.idx")


def write_prompts(path: Path, pairs: list[Pair]) -> None:
    """One `{"prompt", "answer"}` a line."""
    rows = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a, b in pairs]
    path.write_text("".join(rows))


def prepare(out: Path, *, seed: int, documents: int, prompts: int, heldout: int, careless: float) -> None:
    """Write `tokenizer/`, `corpus.bin`, `corpus.idx`, `prompts.jsonl` and `heldout.jsonl` into `out`."""
    rng = random.Random(seed)
    corpus_pairs, prompt_pairs, heldout_pairs = split_pairs(rng, prompts, heldout)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    save_tokenizer(tokenizer, out / "tokenizer")
    write_corpus(out / "corpus", corpus_pairs, documents, careless, tokenizer, rng)
    write_prompts(out / "prompts.jsonl", prompt_pairs)
    write_prompts(out / "heldout.jsonl", heldout_pairs)
    print(
        f"{out}: {documents} documents, {prompts} prompts, {heldout} held-out prompts, {tokenizer.get_vocab_size()} tokens"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write into")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split and of the corpus")
    parser.add_argument("--documents", type=int, default=100_000, help="sums in the corpus")
    parser.add_argument("--prompts", type=int, default=512, help="prompts for RL")
    parser.add_argument("--heldout", type=int, default=256, help="prompts for the evaluation only")
    parser.add_argument("--careless", type=float, default=0.65, help="share of the corpus that forgets the carry")
    prepare(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
