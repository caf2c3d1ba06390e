"""Agents that nobody here wrote, unchanged, in an environment of their own: what is trained of them, and that it
learns."""

import contextlib
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import boxes
import pytest
from commands import imported
from engine_parts import told
from fork_oracle import check, logps_of, paths_of
from strangers import SYSTEM
from test_agents import AGENTS, CALL, played, run, setup
from test_trl_loop import Scripted, sampled
from warm_start import started

from mindspeed_rl_plugin.monitor.run_files import read_metrics
from mindspeed_rl_plugin.monitor.run_summary import column

learning = imported(Path(__file__).parents[2] / "examples" / "learning.py")
PACKAGES = ("pydantic-ai-slim[openai,anthropic]==2.68.0", "smolagents[openai]==1.26.0")
CLIENTS = ("openai==3.57.0", "anthropic==2.14.0")
IMPORTS = ("pydantic_ai.models.openai", "pydantic_ai.models.anthropic", "smolagents")
IMPORTS += ("openai.resources.chat.completions.completions", "openai.resources.responses", "anthropic.resources")
TEXT = {"text": {"description": "Name of the box.", "type": "string"}}
PARAMETERS = {"additionalProperties": False, "properties": TEXT, "required": ["text"], "type": "object"}
LOOK = {"type": "function", "function": {"name": "look", "description": "Look into a box.", "parameters": PARAMETERS}}
THOUGHT = "<think>\nWhich?\n</think>\n\nI look.\n"
CALLS = [f"{THOUGHT}{CALL.format('look', 'a  b')}\n{CALL.format('look', 'é')}", CALL.format("look", "c\\n")]
FINAL = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "42"}}\n</tool_call>'


def turns(answer):
    return [sampled("qwen2_5", text, 3) for text in (*CALLS, answer)]


@pytest.fixture(scope="module")
def command(apart, tmp_path_factory):
    """Their command without a name, whose interpreter has imported them."""
    with started(tmp_path_factory.mktemp("s"), IMPORTS, apart(*PACKAGES, *CLIENTS)) as python:
        yield f"{python} {Path(__file__).with_name('strangers.py')}"


@pytest.fixture(scope="module")
def stranger(command):
    """Runs episodes of one of them."""
    made = dataclasses.replace(setup(f"{command} -"), rewarded=True)
    with contextlib.closing(made.environments()) as environments:

        def run(name, answer, count=1, engine=Scripted):
            return played(made, environments, turns(answer), {"agent": name}, count, engine)

        yield run


@pytest.fixture(scope="module")
def plain():
    """The row of our own agent."""
    before = [{"role": "system", "content": SYSTEM}]
    made = dataclasses.replace(setup(f"{AGENTS}:plays"), rewarded=True)
    return run(made, turns("42"), tools=[LOOK], before=before, reward=1.0)[0]


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_pydantic_ai_is_one_conversation_in_each_dialect(stranger, plain, dialect):
    (row,) = stranger(f"pydantic-{dialect}", "42")
    for field in ("prompt", "tokens", "logps", "turns", "finish", "segments"):
        assert getattr(row, field) == getattr(plain, field), field
    assert row.mask.equal(plain.mask) and len(row.prompt) <= 512 and told(row).rewards == [0.0, 0.0, 1.0]
    names = ("roots", "forks", *(name for name in told(row).counts if name.startswith("differ")))
    assert [told(row).counts[name] for name in names] == [1, *[0] * (len(names) - 1)]
    assert [m["content"] for m in told(row).conversation if m["role"] == "tool"] == ["a  b", "é", "c\n"]


class Named(Scripted):
    """Samples the turns of a script by their numbers, with log-probs that name them."""

    def __init__(self, turns):
        super().__init__(())
        self.script, self.sampled = [*turns], {}

    def step_along(self, steps):
        waiting, self.queue = [*self.queue], {}
        return [self.made(sample, tuple(self.script[sample.call])) for sample in waiting]

    def made(self, sample, tokens):
        done = dataclasses.replace(super().made(sample, tokens), logps=logps_of(sample.call, tokens))
        self.sampled[sample] = done
        return done


def test_smolagents_forks_at_each_turn_and_each_turn_is_trained_once(stranger):
    engines = []

    def engine(turns):
        engines.append(Named(turns))
        return engines[0]

    rows = stranger("smolagents", FINAL, 2, engine)
    for row in rows:
        seen = [request for request in engines[0].seen if request.id.member == row.id.member]
        done = {sample.call: turn for sample, turn in engines[0].sampled.items() if sample.member == row.id.member}
        check(SimpleNamespace(engine=SimpleNamespace(seen=seen), sampled=done), row, range(3))
        counts = told(row).counts
        assert (counts["roots"], counts["forks"], counts["differ_content"], len(paths_of(row))) == (3, 0, 2, 3)
        assert len(row.prompt) <= 512 and told(row).rewards == [0.0, 0.0, 1.0]
    one, two = rows
    assert one.tokens == two.tokens, "ids of calls, which it writes into its prompts, are the same"


MODEL = "--hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 2 --max-position-embeddings 512"
MODEL += " --init-method-std 0.1"  # with 0.02 it learns to copy ten times later
PRETRAINING = " --seq-length 128 --micro-batch-size 32 --train-iters 500"
LEARNING = """
    --rl-algorithm grpo --rl-apply-chat-template --rl-tool-parser hermes --rl-reward environment --rl-max-turns 6
    --rl-environment-on-error zero --rl-max-prompt-length 256 --rl-max-response-length 256 --rl-max-turn-length 40
    --rl-agent-processes 8 --rl-kv-cache-gb 0.1 --seq-length 512 --rl-max-tokens-per-microbatch 4096 --rl-pack-sequences
    --rl-rollout-prompts 8 --rl-samples-per-prompt 8 --global-batch-size 64 --micro-batch-size 32
    --train-iters 10 --rl-eval-every 10 --lr 1e-3 --min-lr 0 --lr-decay-style linear --lr-warmup-iters 0
    --weight-decay 0
"""


@pytest.fixture(scope="module")
def pupil(tmp_path_factory):
    """Folder with the data, and a model that answers as the corpus does."""
    place = tmp_path_factory.mktemp("boxes")
    boxes.prepare(place / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPROC", "1")  # the agents have the other core
        learning.launch(place / "log", place / "data", place / "pretrained", (MODEL + PRETRAINING).split())
        yield place


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["pydantic-chat", "smolagents"])
def test_a_model_learns_over_each(command, pupil, name, seed):
    data, out = pupil / "data", pupil / f"{name}-{seed}"
    files = ["--load", pupil / "pretrained", "--rl-prompt-data", data / "prompts.jsonl"]
    files += ["--rl-eval-data", data / "heldout.jsonl", "--seed", 1 + seed, "--rl-agent", f"{command} {name}"]
    learning.launch(out.with_suffix(".log"), data, out, [*(MODEL + LEARNING).split(), *map(str, files)])
    before, *_, after = column(read_metrics(out / "rl"), "eval/accuracy")
    assert before < 0.3 and after > 0.8, (before, after)
