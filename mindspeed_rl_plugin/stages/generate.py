"""The generate stage: prompts out of the dock, responses drawn, rows back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mindspeed_rl_plugin.dock.api import Dock
from mindspeed_rl_plugin.engine.protocol import Engine, Progress, generate
from mindspeed_rl_plugin.engine.seeds import response_seed
from mindspeed_rl_plugin.rows import Completion, GenerateRequest, Ragged, Rows, SampleId, Sampling

STATE = "generate"
FINISH = ("stop", "length", "abort")


@dataclass(frozen=True)
class Generated:
    """What this rank's engine drew; all ranks of one engine hold the same numbers."""

    responses: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    truncated: int = 0


def run_generation(
    dock: Dock,
    engine: Engine,
    *,
    sampling: Sampling,
    seed_base: int,
    deadline: float,
    ids: Sequence[SampleId],
    on_progress: Progress | None = None,
) -> Generated:
    """Draw a response for each of `ids`, rows of the dock's state "generate", and commit them.

    A row is one response: the prompt of its group, drawn with `response_seed(seed_base, *id)`. The consumers of `dock`
    are the engine replicas (`consumer=engine.replica`), which is not Megatron's data-parallel rank where
    `--rl-generate-tp` differs; all ranks of an engine call with the same ids, its first rank writes.

    deadline: seconds for the prompts, and for the next response of the engine. Writes tokens, loss_mask,
    logp_rollout, length, response_length, finish, version and weights (the engine's) and segments. Raises TimeoutError
    when prompts or responses do not come in time.
    """
    if not ids:
        return Generated()
    lease = dock.lease(STATE, ids=ids, deadline=deadline)
    requests = make_requests(lease.rows, sampling, seed_base)
    completions = generate(engine, requests, deadline=deadline, on_progress=on_progress)
    dock.commit(lease, completion_rows(requests, completions, engine.digest) if engine.leader else None)
    return Generated(
        len(completions),
        sum(len(r.prompt_tokens) for r in requests),
        sum(len(c.tokens) for c in completions),
        sum(c.finish == "length" for c in completions),
    )


def make_requests(rows: Rows, sampling: Sampling, seed_base: int) -> list[GenerateRequest]:
    """One request a row; `rows` hold the column "prompt" of B samples."""
    return [
        GenerateRequest(sample, tuple(prompt.tolist()), sampling, response_seed(seed_base, *sample))
        for sample, prompt in zip(rows.ids, rows["prompt"].rows(), strict=True)
    ]


def weights_number(digest: str | None) -> int:
    """A digest of weights as the dock's column "weights" holds it: its 64 bits as an int64; 0 where there is none."""
    value = int(digest, 16) if digest else 0
    return value - (1 << 64) if value >> 63 else value


def completion_rows(
    requests: Sequence[GenerateRequest], completions: Sequence[Completion], digest: str | None = None
) -> Rows:
    """The columns of drawn responses, aligned with tokens = prompt + response (see `types`).

    tokens int32, loss_mask uint8 (1 on response tokens), logp_rollout float32 (0 on the prompt), length and
    response_length int64, finish int8 (index into FINISH), version int64, weights int64 (`weights_number`), segments
    `[k, 2]` int64 (first token, version of the weights that drew the tokens from there on).
    """
    tokens, masks, logps = [], [], []
    for request, completion in zip(requests, completions, strict=True):
        assert request.id == completion.id, (request.id, completion.id)
        prompt, response = len(request.prompt_tokens), len(completion.tokens)
        tokens.append(torch.tensor((*request.prompt_tokens, *completion.tokens), dtype=torch.int32))
        masks.append(torch.tensor([0] * prompt + [1] * response, dtype=torch.uint8))
        logps.append(torch.tensor([0.0] * prompt + list(completion.logps), dtype=torch.float32))
    return Rows(
        tuple(r.id for r in requests),
        {
            "tokens": Ragged.from_rows(tokens, torch.int32),
            "loss_mask": Ragged.from_rows(masks, torch.uint8),
            "logp_rollout": Ragged.from_rows(logps, torch.float32),
            "length": torch.tensor([len(t) for t in tokens], dtype=torch.int64),
            "response_length": torch.tensor([len(c.tokens) for c in completions], dtype=torch.int64),
            "finish": torch.tensor([FINISH.index(c.finish) for c in completions], dtype=torch.int8),
            "version": torch.tensor([c.version for c in completions], dtype=torch.int64),
            "weights": torch.full((len(completions),), weights_number(digest), dtype=torch.int64),
            "segments": Ragged.from_rows(
                [torch.tensor([[len(r.prompt_tokens), c.version]]) for r, c in zip(requests, completions, strict=True)],
                torch.int64,
            ),
        },
    )
