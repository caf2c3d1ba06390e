"""A job whose only engine is a user's program: the client against real torchrun and real Megatron."""

import subprocess
import sys
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from commands import imported
from safetensors.torch import load_file
from torch.nested import nested_tensor
from transformers import AutoConfig, Qwen3MoeForCausalLM

from mindspeed_rl_plugin.client import Client

ROOT = Path(__file__).parents[2]
example = imported(ROOT / "examples" / "engine_transformers.py")
ALONE = ("--rl-schedule", "async", "--rl-generators", "0", "--rl-max-staleness", "0", "--save-interval", "2")


@pytest.mark.slow
def test_a_users_engine_trains_a_job_and_its_bad_rows_do_not(job, nothing_left) -> None:
    running = job("--train-iters", "3", *ALONE, ranks=2).dumping().start()
    pulled, lines, refused, graded = {}, [], 0, {}

    def observe() -> None:
        with Client(*running.invitation()) as seen:
            while not seen.ended:
                lines.extend(seen.metrics(deadline=0.02))
                rows = seen.read(seen.finished(), ["reward", "response_length"])
                graded.update({tuple(i): r for i, r in zip(rows["ids"].tolist(), rows["reward"].tolist(), strict=True)})

    observer = threading.Thread(target=observe)
    with Client(*running.invitation()) as outside:
        observer.start()
        engine = example.Engine(outside, "cpu")
        engine.load()
        answer = engine.job.give

        def bad_first(rows) -> None:
            nonlocal refused
            for name, value in (("version", 77), ("response", 10**6), ("logps", 1.0)):
                wrong = rows.clone()
                wrong[name] = (
                    torch.full_like(rows[name], value)
                    if name == "version"
                    else torch.nested.nested_tensor_from_jagged(
                        torch.full_like(rows[name].values(), value), rows[name].offsets()
                    )
                )
                with pytest.raises(ValueError, match="is not published|tokens of the model|finite and at most 0"):
                    answer(wrong)
                refused += 1
            answer(rows)

        outside.give = bad_first
        while not outside.ended:
            if outside.newest() != engine.version:
                engine.load()
            if engine.version not in pulled:
                pulled[engine.version] = outside.weights(engine.version)[1]
            if len(prompts := outside.take(16, deadline=0.5)):
                engine.answer(prompts)
    observer.join(60)
    result = running.wait(60)
    assert result.code == 0, result.log[-4000:]
    trained = result.metrics
    assert [line["version"] for line in trained] == [0, 1, 2] and refused >= 9
    result.check_log_probs(3)  # what was given are those of its weights
    assert all(line["grad_norm"] > 1e-3 for line in trained)
    assert lines and lines == trained[: len(lines)], "each line once, as it is in metrics.jsonl"
    dumps = pq.read_table(sorted((running.save / "dump").glob("*.parquet"))[0], columns=["group", "member", "reward"])
    first = {(0, g, m): r for g, m, r in zip(*(c.to_pylist() for c in dumps.columns), strict=True)}
    common = first.keys() & graded.keys()
    assert common and all(first[i] == pytest.approx(graded[i]) for i in common)
    export = [sys.executable, "-m", "mindspeed_rl_plugin", "export", "--load", str(running.save), "--iteration", "2"]
    export += ["--tokenizer", str(running.data / "tokenizer")]  # whose tokens are the rows that are no padding
    subprocess.run([*export, "--out", str(running.save / "hf")], check=True, timeout=120)
    exported = {k: v for file in (running.save / "hf").glob("*.safetensors") for k, v in load_file(file).items()}
    assert exported.keys() == pulled[2].keys() and len(pulled) == 3
    unlike = {n: (exported[n] - t).abs().max().item() for n, t in pulled[2].items() if not torch.equal(exported[n], t)}
    assert not unlike, unlike
    assert not torch.equal(pulled[1]["lm_head.weight"], pulled[2]["lm_head.weight"])
    nothing_left()


class Rerouted(example.Engine):
    """Chooses experts by scores with a bias, which their weights do not see, and gives its choice."""

    def load(self, version: int | None = None) -> None:
        self.version, weights = self.job.weights(version)
        config = AutoConfig.for_model(**self.job.model_config)
        self.model = Qwen3MoeForCausalLM.from_pretrained(None, config=config, state_dict=weights).eval()
        self.model.model.layers[1].mlp.gate.register_forward_hook(self.choose)

    def choose(self, gate, given, output):
        self.chosen = (output[0] + torch.linspace(0, 0.02, output[0].shape[1])).topk(gate.top_k).indices
        return output[0], output[0].gather(1, self.chosen).softmax(-1), self.chosen

    @torch.inference_mode()
    def routes(self, row) -> torch.Tensor:
        """`[P + R, 1, K]`"""
        self.model(torch.cat([self.prompts[tuple(row["ids"].tolist())], row["response"]])[None])
        return torch.cat([torch.zeros_like(self.chosen[:1]), self.chosen[:-1]])[:, None]


@pytest.mark.slow
def test_a_users_engine_tells_its_routes(job, moe_model) -> None:
    running = job("--train-iters", "3", *ALONE, "--rl-router-replay", "rollout", model=moe_model, ranks=1).start()
    with Client(*running.invitation()) as outside:
        engine, give = Rerouted(outside, "cpu"), outside.give
        outside.give = lambda rows: give(
            rows.set("routes", nested_tensor([*map(engine.routes, rows.unbind(0))], layout=torch.jagged))
        )
        while not outside.ended:
            if outside.newest() != engine.version:
                engine.load()
            if len(taken := outside.take(16, deadline=0.5)):
                engine.prompts = dict(zip(map(tuple, taken["ids"].tolist()), taken["prompt"].unbind(), strict=True))
                engine.answer(taken)
    result = running.wait(120)
    assert result.code == 0, result.log[-4000:]
    result.check_log_probs(3)
    assert all(line["ratio/mean"] == line["ratio/max"] == 1 for line in result.metrics)
    assert all(line["router/differ"] > 0.005 for line in result.metrics), "it chose as the trainer would"
