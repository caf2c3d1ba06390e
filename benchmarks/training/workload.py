"""What both arms train on: a random model on disk, prompts of known tokens, and the length of every response.

The first word of every prompt names it; so an arm knows by its tokens which prompt it answers, and
takes the imposed length of each of its responses from one table.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 16  # by default
END = "<|endoftext|>"
MEDIAN = 0.325  # of the lognormal lengths, in limits


@dataclass(frozen=True)
class Case:
    """Sizes of one case. prompts: of one iteration, all in one process's reach; members: responses of each;
    limit: longest response [tokens]; tailed: lognormal lengths with a mean of 40% of the limit, else all alike;
    micro_batch: rows of one forward and backward; prompt: tokens of each; shared: this project gets
    --rl-share-prompts."""

    prompts: int
    members: int
    limit: int
    tailed: bool
    vocabulary: int
    hidden: int = 256
    layers: int = 2
    heads: int = 4
    micro_batch: int = 8
    prompt: int = PROMPT_TOKENS
    shared: bool = False

    @property
    def samples(self) -> int:
        """Responses of one iteration, which is one optimizer step."""
        return self.prompts * self.members


CASES = {
    "short": Case(prompts=16, members=8, limit=64, tailed=False, vocabulary=4096),
    "long-tailed": Case(prompts=8, members=8, limit=512, tailed=True, vocabulary=4096),
    # Close to the mean length of the case above, and a third of that.
    "vocabulary": Case(prompts=4, members=8, limit=192, tailed=False, vocabulary=152000, micro_batch=16),
    "vocabulary-short": Case(prompts=4, members=8, limit=64, tailed=False, vocabulary=152000, micro_batch=16),
    "long-prompts": Case(prompts=8, members=8, limit=64, tailed=False, vocabulary=4096, prompt=512, shared=True),
}


def lengths(case: Case, seed: int = 0) -> list[list[int]]:
    """`[prompt][member]` tokens of each response."""
    rng = random.Random(seed)

    def one() -> int:
        if not case.tailed:
            return case.limit
        # exp(0.8^2 / 2) = 1.38, and what is cut at the limit: a mean of 40% of it
        return min(max(round(rng.lognormvariate(0.0, 0.8) * MEDIAN * case.limit), 4), case.limit)

    return [[one() for _ in range(case.members)] for _ in range(case.prompts)]


def tokens(case: Case) -> int:
    """Prompt and response tokens of one iteration, what Eq. 5 counts."""
    return case.samples * case.prompt + sum(map(sum, lengths(case)))


def prompt_of(ids: Sequence[int]) -> int:
    """Which prompt these tokens are: its first word is its number."""
    return ids[0]


def reward(response: str) -> float:
    """A grade that any text has; both arms use it."""
    return sum(map(ord, response)) % 5 / 4


def tokenizer(vocabulary: int) -> Any:
    """Of words w0, w1, ... and the end token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(vocabulary - 1)} | {END: vocabulary - 1}
    raw = Tokenizer(models.WordLevel(words, unk_token=END))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=END, pad_token=END)


def write(folder: Path, case: Case) -> None:
    """Model, tokenizer, prompts and the case itself into `folder`."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder.mkdir(parents=True)
    tokenizer(case.vocabulary).save_pretrained(folder / "tokenizer")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=case.vocabulary,
        hidden_size=case.hidden,
        intermediate_size=2 * case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.heads // 2,
        max_position_embeddings=case.prompt + case.limit,
        tie_word_embeddings=False,
        eos_token_id=case.vocabulary - 1,
        pad_token_id=case.vocabulary - 1,
    )
    Qwen2ForCausalLM(config).float().save_pretrained(folder / "model")
    prompts = [" ".join(f"w{(i if j == 0 else 100 + j)}" for j in range(case.prompt)) for i in range(case.prompts)]
    with (folder / "prompts.jsonl").open("w") as file:
        file.writelines(json.dumps({"prompt": p, "answer": ""}) + "\n" for p in prompts)
    grader = "import workload\n\n\ndef grade(response):\n    return workload.reward(response)\n"
    (folder / "grader.py").write_text(grader)
    (folder / "case.json").write_text(json.dumps(asdict(case)))


def read(folder: Path) -> Case:
    """The case of a folder that `write` wrote."""
    return Case(**json.loads((folder / "case.json").read_text()))
