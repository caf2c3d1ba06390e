"""Run by test_routes.py under torchrun: routes that engines record, against those of transformers' model of the same
weights. Arguments: a folder for files, family, tensor and expert parallel size. The KV cache has few blocks."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from mindspeed_rl_plugin.device import Device
from mindspeed_rl_plugin.engine.options import VllmOptions
from mindspeed_rl_plugin.engine.rollout_engine import generate
from mindspeed_rl_plugin.engine.routes import ROUTES
from mindspeed_rl_plugin.engine.vllm_engine import VllmEngine
from mindspeed_rl_plugin.rows import GenerateRequest, SampleId, Sampling

VOCAB, LONGEST, LAYERS, K = 64, 160, 3, 2
SLOTS = 416  # of the KV cache: for two or three long responses
SIZES = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=2)
SIZES |= dict(num_key_value_heads=2, max_position_embeddings=LONGEST, tie_word_embeddings=False, initializer_range=0.1)
SIZES |= dict(moe_intermediate_size=48, num_experts_per_tok=K, norm_topk_prob=True, rms_norm_eps=1e-6)
GROUPED = dict(n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, n_group=4, topk_group=2)
LATENT = dict(kv_lora_rank=512, q_lora_rank=24, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
AS_PUBLISHED = dict(topk_method="noaux_tc", scoring_func="sigmoid")  # transformers' config of deepseek_v3 has neither
FAMILIES = {
    "qwen3_moe": dict(num_experts=8, head_dim=32, mlp_only_layers=[0]),
    "qwen3_moe_large": dict(num_experts=300, head_dim=32, mlp_only_layers=[0]),  # ids do not fit into a byte
    "glm4_moe": GROUPED | dict(head_dim=32),
    "deepseek_v3": GROUPED | LATENT,
}


class Reference:
    """transformers' model. experts: [M, T, K] of the last forward."""

    def __init__(self, family: str, folder: Path) -> None:
        torch.manual_seed(0)
        kind = family.removesuffix("_large")
        self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | FAMILIES[family])).float()
        self.gates = [m for name, m in self.model.named_modules() if name.endswith("gate") and hasattr(m, "top_k")]
        with torch.no_grad():
            for name, t in (*self.model.named_parameters(), *self.model.named_buffers()):
                if name.endswith(("bias", "gate.weight")):
                    t.normal_(std=0.3)
        self.model.eval().save_pretrained(folder)  # transformers writes on the first rank only
        dist.barrier()
        self.config = json.loads((folder / "config.json").read_text()) | AS_PUBLISHED
        for gate in self.gates:
            gate.register_forward_hook(lambda module, given, out: self.experts.append(out[2]))

    @torch.no_grad()
    def routes(self, tokens) -> torch.Tensor:
        """The column of these tokens, `[L, M, K]`, sorted."""
        self.experts = []
        self.model(torch.tensor(tokens)[None])
        rows = torch.stack(self.experts, 1).sort(-1).values
        return torch.cat([torch.zeros_like(rows[:1]), rows[:-1]])


class Check:
    """An engine and what its routes must be."""

    def __init__(self, folder: Path, family: str, tp: int, ep: int) -> None:
        self.reference = Reference(family, folder)
        latent = family.startswith("deepseek")
        entry = 576 * 4 if latent else 2 * 2 * 32 * 4 // tp
        self.prefixes = not latent  # vLLM's latent attention on a CPU caches none
        options = VllmOptions(
            self.reference.config,
            LONGEST,
            tp,
            ep,
            max_running=8,
            kv_cache_bytes=SLOTS * LAYERS * entry,
            weights=str(folder),
            record_routes=True,
        )
        self.engine, self.version = VllmEngine(options, Device("cpu")), 0
        self.engine.update_weights(0)

    def change(self, in_flight: bool) -> None:
        """Weights under which most tokens go elsewhere."""
        for name, weight in self.engine.parameters().items():
            if name.endswith("mlp.gate.weight"):
                weight.neg_()
        for gate in self.reference.gates:
            gate.weight.data.neg_()
        self.version += 1
        self.engine.update_weights(self.version, in_flight=in_flight)

    def run(self, requests):
        return generate(self.engine, requests, deadline=60)

    def kept(self) -> int:
        """How many requests vLLM has computed again, of those that it knows."""
        return sum(len(held.kept) > 0 for held in self.engine._routes._held.values())

    def compare(self, done, prompt, first=0, end=None, layers=slice(None)) -> torch.Tensor:
        """Entries [first, end) are those of the reference's present weights. Returns these."""
        tokens = (*prompt, *done.tokens)
        column, expected = done.columns[ROUTES], self.reference.routes(tokens)
        assert len(column) == 1 and column.values.shape == expected.shape == (len(tokens), LAYERS - 1, K)
        large = max(gate.weight.shape[0] for gate in self.reference.gates) > 256
        assert column.values.dtype == (torch.int16 if large else torch.uint8)
        got = column.row(0).long().sort(-1).values
        same = (got == expected)[first:end, layers].flatten(1).all(1)
        assert same.all(), (done.id, first, end, len(tokens), (~same).nonzero().flatten().tolist())
        return expected


def prompt_of(seed: int, length: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def request(number: int, length: int, tokens: int = 20) -> GenerateRequest:
    return GenerateRequest(SampleId(0, number, 0), prompt_of(number, length), Sampling(tokens, ignore_eos=True), number)


def check_batch(check: Check) -> None:
    """Prompts of different lengths in one batch; then again, from the cache of prefixes."""
    requests = [request(i, length) for i, length in enumerate((1, 5, 40, 70))]
    for asked, done in zip(requests, check.run(requests), strict=True):
        check.compare(done, asked.prompt_tokens)
    long, steps = request(9, 140), []
    run_step = check.engine._routes._move
    check.engine._routes._move = lambda tokens: (steps.append(tokens), run_step(tokens))
    for again in (long, replace(long, id=SampleId(0, 10, 0), seed=99)):
        steps.clear()
        check.compare(check.run([again])[0], long.prompt_tokens)
    del check.engine._routes._move
    cached = (len(long.prompt_tokens) - 1) // check.engine._routes._block * check.engine._routes._block
    assert steps[0] == len(long.prompt_tokens) - cached * check.prefixes, (
        steps,
        cached,
    )  # a cached prefix is not computed


def check_resume(check: Check) -> None:
    """An aborted response keeps its routes, and its last token, which was sampled but never routed, gets new ones."""
    asked = [request(i, 20 + 7 * i) for i in range(3)]
    check.engine.submit(asked)
    for _ in range(6):
        check.engine.step_along(1)
    begun = check.engine.abort()
    old = [check.compare(part, r.prompt_tokens) for part, r in zip(begun, asked, strict=True)]
    check.change(in_flight=False)
    again = [replace(r, begun=part, seed=r.seed + 50) for r, part in zip(asked, begun, strict=True)]
    check.engine.submit(again)  # and aborted before it has begun
    for part, before in zip(check.engine.abort(), begun, strict=True):
        assert torch.equal(part.columns[ROUTES].values, before.columns[ROUTES].values)
    for r, done, before in zip(again, check.run(again), old, strict=True):
        new = check.compare(done, r.prompt_tokens, len(before))
        got = done.columns[ROUTES].row(0)[: len(before)].long().sort(-1).values
        assert torch.equal(got, before) and len(before) == len(r.prompt_tokens) + len(r.begun.tokens)
        assert (new[1 : len(before)] != before[1:]).any(-1).double().mean() > 0.5, "they route most tokens elsewhere"
    with pytest.raises(AssertionError, match="begun tokens without their routes"):
        check.engine.submit([replace(again[0], begun=replace(begun[0], columns={}))])


def check_in_flight(check: Check) -> None:
    """Weights change under running responses, some of which are then preempted: their tokens keep their routes."""
    asked = [request(i, 90 + 3 * i, tokens=45) for i in range(5)]
    check.engine.submit(asked)
    for _ in range(15):
        check.engine.step_along(1)
    tokens = {
        r.id: (*r.prompt_tokens, *check.engine._running[name].tokens)
        for name, r in zip([*check.engine._running], asked, strict=True)
    }
    old = {sample: check.reference.routes(begun) for sample, begun in tokens.items()}
    check.change(in_flight=True)
    most, done = 0, []
    while len(done) < len(asked):
        done += check.engine.step_along(1)
        most = max(most, check.kept())
    assert most, "nothing was preempted; give the engine fewer blocks"
    changed = 0
    for part in done:
        r = asked[part.id.group]
        sampled = next((first for first, version in part.segments if version == check.version))
        before = len(r.prompt_tokens) + sampled if sampled else 0
        got = part.columns[ROUTES].row(0).long().sort(-1).values
        assert torch.equal(got[:before], old[r.id][:before]), (r.id, before)
        # What is before the first layer with experts knows nothing of the old weights.
        check.compare(part, r.prompt_tokens, max(before, 1), None, slice(0, 1))
        changed += bool(sampled)
    assert changed


def main(folder: Path, family: str, tp: int, ep: int) -> None:
    dist.init_process_group("gloo")
    check = Check(folder, family, tp, ep)
    check_batch(check)
    check.change(in_flight=False)
    check_resume(check)
    if check.engine.options.sharing == 1:
        check_in_flight(check)
        check.engine.sleep()
        check.engine.wake(("kv_cache",))
        assert check.engine._routes._rows is None
    check.engine.shutdown()
    print(f"routes {dist.get_rank()} passed")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
