"""An engine of your own: it answers the prompts of a running job with `transformers` in the place of vLLM.

    python examples/engine_transformers.py --join HOST:PORT --secret-file SAVE/rl/secret

The job prints address and file at its start; started with `--rl-schedule async --rl-generators 0` it has no engine but
those that join. Model, sampling and weights come from the job (mindspeed_rl_plugin/client.py, docs/service.md). Several
of these may work for one job, beside vLLM's. Left out: continuous batching, stop strings, the seeds of the responses.
"""

from __future__ import annotations

import argparse
import time

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from mindspeed_rl_plugin.client import Client


class Engine:
    """The model of a job, with the weights of one version of it."""

    def __init__(self, job: Client, device: str) -> None:
        self.job, self.device = job, device
        self.model: PreTrainedModel | None = None
        self.version = -1
        self.counts = {"seconds": 0.0, "back-pressure": 0.0, "version": 0.0, "tokens": 0.0, "responses": 0.0}

    def load(self, version: int | None = None) -> None:
        """Pull a version of the weights, the newest by default."""
        began = time.monotonic()
        self.version, weights = self.job.weights(version)
        if self.model is None:
            config = AutoConfig.for_model(**self.job.model_config)
            dtype = next(iter(weights.values())).dtype
            self.model = AutoModelForCausalLM.from_config(config).to(self.device, dtype).eval()
            self.model.generation_config = type(self.model.generation_config)()  # nothing but what is given below
        missing, unexpected = self.model.load_state_dict(weights, strict=False)
        if unexpected or (missing and not self.model.config.tie_word_embeddings):
            raise SystemExit(f"the job's model is not transformers': missing {missing}, unexpected {unexpected}")
        self.counts["version"] += time.monotonic() - began

    def answer(self, prompts: TensorDict) -> None:
        """Generate and give a response for each row, those together that the same weights sample in the same way."""
        tokens = prompts["prompt"].unbind()
        newest = prompts["newest"]
        wanted = torch.where(newest >= 0, newest, prompts["oldest"].clamp(min=self.version))
        for version, greedy in sorted({*zip(wanted.tolist(), prompts["greedy"].tolist(), strict=True)}):
            if version != self.version:
                self.load(version)
            rows = ((wanted == version) & (prompts["greedy"] == greedy)).nonzero().flatten().tolist()
            responses, logps = self.generate([tokens[i] for i in rows], greedy)
            given = {
                "ids": prompts["ids"][rows],
                "response": torch.nested.nested_tensor(responses, layout=torch.jagged),
                "logps": torch.nested.nested_tensor(logps, layout=torch.jagged),
                "version": torch.full((len(rows),), self.version),
            }
            self.job.give(TensorDict(given, batch_size=[len(rows)]))
            self.counts["tokens"] += sum(map(len, responses))
            self.counts["responses"] += len(responses)

    @torch.inference_mode()
    def generate(self, prompts: list[Tensor], greedy: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Tokens of each response, with the end token where there is one, and their log-probs in nats: of the
        distribution that they were sampled from, of greedy ones that of temperature 1."""
        sampling, ends = self.job.sampling, self.job.end_tokens
        longest = max(map(len, prompts))
        padded = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(padded)
        for i, prompt in enumerate(prompts):  # on the left
            padded[i, longest - len(prompt) :], mask[i, longest - len(prompt) :] = prompt, 1
        how = {"do_sample": False}
        if not greedy:
            how = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p}
            how["top_k"] = sampling.top_k
        out = self.model.generate(
            input_ids=padded.to(self.device),
            attention_mask=mask.to(self.device),
            max_new_tokens=sampling.max_tokens,
            eos_token_id=list(ends) or None,
            pad_token_id=ends[0] if ends else 0,
            return_dict_in_generate=True,
            output_scores=not greedy,
            output_logits=greedy,
            **how,
        )
        scores = torch.stack(out.logits if greedy else out.scores, dim=1).float().log_softmax(-1)
        tokens = out.sequences[:, longest:]
        logps = scores.gather(-1, tokens[..., None])[..., 0].cpu()
        tokens = tokens.cpu()
        ended = torch.isin(tokens, torch.tensor(ends)).int()
        lengths = ((ended.cumsum(1) - ended) == 0).sum(1).tolist()
        return [t[:n] for t, n in zip(tokens, lengths, strict=True)], [
            p[:n] for p, n in zip(logps, lengths, strict=True)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--join", required=True, metavar="HOST:PORT", help="the job's address, printed at its start")
    parser.add_argument("--secret-file", required=True, help="the file that is printed there")
    parser.add_argument("--rows", type=int, default=256, help="responses that are generated together")
    parser.add_argument("--device", default="cpu", help="where the model is")
    options = parser.parse_args()
    with Client(options.join, options.secret_file) as job:
        if job.sampling.stop:
            raise SystemExit(f"--rl-stop {job.sampling.stop}: this engine knows no stop strings; take vLLM's")
        engine, began = Engine(job, options.device), time.monotonic()
        engine.load()  # waits for the first version
        print(f"the engine generates, by version {engine.version} at first", flush=True)
        while not job.ended:
            if job.newest() != engine.version:
                engine.load()
            waiting = time.monotonic()
            prompts = job.take(options.rows, deadline=1.0)
            engine.counts["back-pressure"] += time.monotonic() - waiting
            if len(prompts):
                engine.answer(prompts)
            job.report({**engine.counts, "seconds": time.monotonic() - began})
    print("the job has ended", flush=True)


if __name__ == "__main__":
    main()
