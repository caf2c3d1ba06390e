"""The generate stage: prompts out of the dock, responses drawn, rows back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mindspeed_rl_plugin.dock.api import Dock
from mindspeed_rl_plugin.rollout.engine import Engine, Progress, generate
from mindspeed_rl_plugin.rollout.seeds import response_seed
from mindspeed_rl_plugin.types import Completion, GenerateRequest, Ragged, Rows, Sampling

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
    max_rows: int | None = None,
    on_progress: Progress | None = None,
) -> Generated:
    """Draw a response for every row that the dock's state "generate" has left, and commit them.

    A row is one response: the prompt of its group, drawn with `response_seed(seed_base, *id)`. With a shared dock
    this is collective, and its consumers are the engine replicas (`consumer=engine.replica`), which is not
    Megatron's data-parallel rank where `--rl-generate-tp` differs; the first rank of each engine writes.

    deadline: seconds for each lease, and for the next response of the engine; max_rows: most rows leased at
    once, None takes this engine's whole share. Writes tokens, loss_mask, logp_rollout, response_length, finish
    and version (the engine's). Raises TimeoutError when prompts or responses do not come in time.
    """
    total = Generated()
    while dock.remaining(STATE):
        lease = dock.lease(STATE, max_rows=max_rows, deadline=deadline)
        requests = make_requests(lease.rows, sampling, seed_base)
        completions = generate(engine, requests, deadline=deadline, on_progress=on_progress)
        rows = completion_rows(requests, completions)
        dock.commit(lease, rows if engine.leader and len(rows) else None)
        total = _add(total, requests, completions)
    return total


def make_requests(rows: Rows, sampling: Sampling, seed_base: int) -> list[GenerateRequest]:
    """One request a row; `rows` hold the column "prompt" of B samples."""
    return [
        GenerateRequest(sample, tuple(prompt.tolist()), sampling, response_seed(seed_base, *sample))
        for sample, prompt in zip(rows.ids, rows["prompt"].rows(), strict=True)
    ]


def completion_rows(requests: Sequence[GenerateRequest], completions: Sequence[Completion]) -> Rows:
    """The columns of drawn responses, aligned with tokens = prompt + response (see `types`).

    tokens int32, loss_mask uint8 (1 on response tokens), logp_rollout float32 (0 on the prompt), response_length
    int64, finish int8 (index into FINISH), version int64.
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
            "response_length": torch.tensor([len(c.tokens) for c in completions], dtype=torch.int64),
            "finish": torch.tensor([FINISH.index(c.finish) for c in completions], dtype=torch.int8),
            "version": torch.tensor([c.version for c in completions], dtype=torch.int64),
        },
    )


def _add(total: Generated, requests: Sequence[GenerateRequest], completions: Sequence[Completion]) -> Generated:
    return Generated(
        total.responses + len(completions),
        total.prompt_tokens + sum(len(r.prompt_tokens) for r in requests),
        total.response_tokens + sum(len(c.tokens) for c in completions),
        total.truncated + sum(c.finish == "length" for c in completions),
    )
