"""What both arms of episodes.py start from: a small model that really makes calls, its tokenizer, and tasks.

    python benchmarks/training/episode_task.py FOLDER TEMPLATE.jinja      # turns of 44 tokens
    python benchmarks/training/episode_task.py FOLDER --from OTHER short  # of 21, by the model of the first command
    python benchmarks/training/episode_task.py FOLDER --from OTHER long   # of 119

The model is trained here, for a minute or two, on conversations of a script under the stock chat template of Qwen2.5:
turns of some words and a call, as long as the answer is `more`, and `done` where it is `over`. How many words a turn
has is drawn, so turns differ in length.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path
from typing import Any

NAMES = ("amber", "birch", "cedar", "dune", "ember", "fern", "grove", "heath")
NAMES += ("iris", "jade", "kelp", "lake", "moss", "north", "oak", "pine")
WORD = "so"
MOST_ROUNDS = 4  # of a task
MOST_CALLS = 6  # of a conversation of the script
MORE, LIMIT = 0.96, 512  # 25 words a turn on average; a call has 19 tokens
AGAIN = 0.6  # probability of `more` in the script
STEPS, BATCH, LR = 100, 8, 2e-3
OTHER_STEPS, OTHER_BATCH, OTHER_LR = 30, 4, 5e-4  # from that model on
OTHERS = {"short": (0.5, LIMIT), "long": (0.99, 1024)}  # a further word, and the limit: 2 words, 100 words
DECIDES = 20.0  # weight in the loss of a turn's first token, which decides whether a call follows
LEARNED = 0.02  # most loss in the end of what can be known, which is all but whether a further word follows [nats]
TURNS = 8  # most of an episode
MEMBERS = 4  # responses of a task
MICRO_BATCH = 8  # rows of one forward and backward
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<tool_call>", "</tool_call>")
CUTS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def tasks(count: int) -> list[dict[str, Any]]:
    """Rows of data."""
    rounds = [1 + i % MOST_ROUNDS for i in range(count)]
    return [{"prompt": f"work {who}", "who": who, "rounds": n} for n, who in zip(rounds, NAMES, strict=False)]


def conversation(draw: random.Random, more: float = MORE) -> list[dict[str, Any]]:
    """One of the script. more: probability that a turn has a further word."""

    def several(first: Any, share: float) -> list[Any]:
        return [first, *itertools.takewhile(lambda _: draw.random() < share, itertools.repeat(first))]

    call = {"type": "function", "function": {"name": "work", "arguments": {"part": "next"}}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"work {draw.choice(NAMES)}"}]
    for _ in several("more", AGAIN)[:MOST_CALLS]:
        messages.append({"role": "assistant", "content": " ".join(several(WORD, more)), "tool_calls": [call]})
        messages.append({"role": "tool", "name": "work", "content": "more"})
    messages[-1]["content"] = "over"
    return [*messages, {"role": "assistant", "content": "done"}]


def make_tokenizer(template: str, texts: list[str]) -> Any:
    """A byte-level BPE in the manner of Qwen2.5, of these texts."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(CUTS), "isolated"), level])
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet, show_progress=False))
    raw.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    raw.add_tokens([AddedToken(token, normalized=False, special=False) for token in ADDED])
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    made.chat_template = template
    return made


def sampled(ids: list[int], header: list[int], end: int) -> list[bool]:
    """Which tokens the model says: from behind each header of a turn to its end token."""
    marks, says = [], False
    for place, token in enumerate(ids):
        marks.append(says)
        says = (says and token != end) or ids[max(place + 1 - len(header), 0) : place + 1] == header
    return marks


def train(model: Any, tokenizer: Any, more: float, steps: int, batch: int, lr: float) -> None:
    """Learn the script. Raises RuntimeError where that fails."""
    import torch

    torch.set_num_threads(2)
    header, end = tokenizer.encode("<|im_start|>assistant\n"), tokenizer.eos_token_id
    words = torch.tensor(tokenizer.encode(WORD) + tokenizer.encode(f" {WORD}"))
    draw = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        said = [conversation(draw, more) for _ in range(batch)]
        rows = tokenizer.apply_chat_template(said, tools=schemas())["input_ids"]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        marks = [sampled(row, header, end) for row in rows]
        mask = torch.tensor([row + [False] * (longest - len(row)) for row in marks])
        says, drawn = mask[:, 1:], torch.isin(ids[:, :-1], words)
        logits = model(input_ids=ids[:, :-1]).logits
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        weights = says * torch.where(mask[:, :-1], 1.0, DECIDES)
        loss = (losses * weights).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 25 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.4f}, {losses[says & ~drawn].mean().item():.4f}", flush=True)
    if (left := losses[says & ~drawn].mean().item()) > LEARNED:
        raise RuntimeError(
            f"the model has not learned the script: a loss of {left:.3g} after {steps} steps, not {LEARNED}"
        )


def schemas() -> list[Any]:
    """Of the tools."""
    import episode_tools
    from transformers.utils import get_json_schema

    return [get_json_schema(episode_tools.work)]


def write(folder: Path, template: str) -> None:
    """Model and tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    draw, tools = random.Random(1), schemas()
    plain = make_tokenizer(template, [])
    texts = [plain.apply_chat_template(conversation(draw), tools=tools, tokenize=False) for _ in range(200)]
    tokenizer = make_tokenizer(template, texts)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        initializer_range=0.05,  # with 0.02 attention needs long to find the answer
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config).float()
    train(model, tokenizer, MORE, STEPS, BATCH, LR)
    save(folder, model, tokenizer, LIMIT)


def write_other(folder: Path, start: Path, turns: str) -> None:
    """Model and tokenizer for turns of `OTHERS`. start: folder of `write`."""
    from transformers import AutoTokenizer, Qwen2ForCausalLM

    model = Qwen2ForCausalLM.from_pretrained(start / "model").float()
    tokenizer = AutoTokenizer.from_pretrained(start / "tokenizer")
    more, limit = OTHERS[turns]
    train(model, tokenizer, more, OTHER_STEPS, OTHER_BATCH, OTHER_LR)
    save(folder, model, tokenizer, limit)


def save(folder: Path, model: Any, tokenizer: Any, limit: int) -> None:
    """What the arms read."""
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "tokenizer")
    prompts = [[{"role": "user", "content": task["prompt"]}] for task in tasks(len(NAMES))]
    ids = [tokenizer.apply_chat_template(p, tools=schemas(), add_generation_prompt=True)["input_ids"] for p in prompts]
    sizes = {"prompt": max(map(len, ids)), "vocabulary": len(tokenizer), "limit": limit}
    (folder / "sizes.json").write_text(json.dumps(sizes))


if __name__ == "__main__":
    if sys.argv[2] == "--from":
        write_other(Path(sys.argv[1]), Path(sys.argv[3]), sys.argv[4])
    else:
        write(Path(sys.argv[1]), Path(sys.argv[2]).read_text())
