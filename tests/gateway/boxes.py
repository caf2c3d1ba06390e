"""A task that a tiny model learns over the agents of strangers.py: which of eight colours a box has.

Most pupils who wrote the corpus guess; the others look, and say what they saw.
"""

import json
import random
from pathlib import Path

from commands import imported
from strangers import SYSTEM

episodes = imported(Path(__file__).parents[2] / "examples" / "episodes" / "prepare.py")
BOXES, COLOURS = "01234567", ("red", "blue", "green", "black", "white", "brown", "pink", "gold")
TEMPLATE = episodes.Template(episodes.TEMPLATE)
TOOLS = [{"function": {"name": name}} for name in ("look", "final_answer")]


def call(name, **arguments):
    return "{}{}{}".format(episodes.CALL[0], json.dumps({"name": name, "arguments": arguments}), episodes.CALL[1])


def said(role, content):
    return {"role": role, "content": content}


def texts(chance, smol):
    """The texts of one pupil's requests, as pydantic-ai or smolagents sends them."""
    box, saw, looks = chance.choice(BOXES), f"={chance.choice(COLOURS)}", chance.random() < 0.4
    opening = [said("system", SYSTEM), said("user", f"New task:\n{box}" if smol else box)]
    looked, answer = said("assistant", call("look", text=box)), call("final_answer", answer=saw) if smol else saw
    if not looks:
        conversations = [[*opening, said("assistant", answer)]]
    elif smol:
        function = {"name": "look", "arguments": {"text": box}}
        made = [{"id": f"call_0_0-{chance.getrandbits(32):08x}", "type": "function", "function": function}]
        again = [said("assistant", f"Calling tools:\n{made}"), said("user", f"Observation:\n{saw}")]
        conversations = [[*opening, looked], [*opening, *again, said("assistant", answer)]]
    else:
        conversations = [[*opening, looked, said("tool", saw), said("assistant", answer)]]
    return [TEMPLATE.render(messages=messages, tools=TOOLS[: 1 + smol]) for messages in conversations]


def rows(chance, count):
    for _ in range(count):
        boxes = {box: f"={chance.choice(COLOURS)}" for box in BOXES}
        yield {"prompt": (box := chance.choice(BOXES)), "answer": boxes[box], "boxes": boxes}


def prepare(out, documents=12_000):
    """Write tokenizer, corpus, prompts and held-out prompts into `out`."""
    chance = random.Random(0)
    corpus = [text for n in range(documents) for text in texts(chance, n % 2)]
    out.mkdir(parents=True)
    tokenizer = episodes.build_tokenizer(corpus[:5000], size=510)
    episodes.save_tokenizer(tokenizer, out / "tokenizer")
    episodes.write_corpus(out / "corpus", corpus, tokenizer, end="")
    for name, count in (("prompts", 256), ("heldout", 32)):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(chance, count)))
