"""The last part of each response, which one version of the weights has sampled; its log-probs against the trainer's.
The stage that dumps it is loaded by a job."""

import torch
from tensordict import TensorDict

from mindspeed_rl_plugin.dock import ColumnSpec

AGREEMENT = 2e-5  # nats, fp32
LAST_PART = ("--rl-stage", f"{__file__}:LastPart")


class LastPart:
    """Dumps the version of the last part of each response, and its first token."""

    reads = ("segments",)
    writes = tuple(ColumnSpec(name, torch.int64, "sample", ragged=False) for name in ("last_first", "last_version"))

    def compute(self, rows: TensorDict) -> TensorDict:
        first, version = torch.stack([parts[-1] for parts in rows["segments"].unbind()]).T
        return TensorDict({"last_first": first, "last_version": version}, batch_size=rows.batch_size)


def check_log_probs(rows: list[dict], inflight: str) -> None:
    """Where the newest weights sampled the last part of a response, its log-probs are the trainer's: to the last digits
    where the tokens before it went through these weights too. What an environment says has none."""
    worst = {False: [], True: []}  # of several parts
    for row in rows:
        if row["last_version"] == row["iteration"] - 1:
            first = row["last_first"] - len(row["prompt_tokens"])
            pairs = zip(row["logp_rollout"][first:], row["logp_old"][first:], strict=True)
            worst[first > 0].append(max(abs(a - b) for a, b in pairs if a))
    assert worst[False] and max(worst[False]) < AGREEMENT
    assert bool(worst[True]) == (inflight != "drain")
    if inflight == "recompute":
        assert max(worst[True]) < AGREEMENT
    if inflight == "keep":
        assert max(worst[True]) > AGREEMENT, "keys and values of older weights make a difference"
