"""Run by test_vllm_processes.py under torchrun: engines that share experts against engines of their own, real vLLM.

Arguments: tensor parallel size of an engine, ranks over which experts are spread, family.
"""

import os
import sys
import time
from pathlib import Path

from mindspeed_rl_plugin.host import activate_if_needed

activate_if_needed()

import pytest  # noqa: E402
import torch.distributed as dist  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "reshard"))
from reshard_reference import engine_weights, random_weights  # noqa: E402

from mindspeed_rl_plugin.device import Device  # noqa: E402
from mindspeed_rl_plugin.engine.expert_group import AGREE_EVERY, ExpertGroup  # noqa: E402
from mindspeed_rl_plugin.engine.options import VllmOptions  # noqa: E402
from mindspeed_rl_plugin.engine.protocol import generate  # noqa: E402
from mindspeed_rl_plugin.engine.vllm_engine import VllmEngine  # noqa: E402
from mindspeed_rl_plugin.layout.layout import EngineParallel, ModelShape  # noqa: E402
from mindspeed_rl_plugin.ranks import HardDeadline  # noqa: E402
from mindspeed_rl_plugin.rows import GenerateRequest, SampleId, Sampling  # noqa: E402
from mindspeed_rl_plugin.weights.live import engine_storage  # noqa: E402

AGREEMENT = 2e-5  # nats, fp32
LONGEST = 12
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


def build(tp: int, ep: int) -> VllmEngine:
    """An engine with the same model whatever its layout."""
    options = VllmOptions(CONFIG, 32, tp, ep, max_running=4, kv_cache_bytes=32 << 20, deadline=120.0)
    engine = VllmEngine(options, Device("cpu"))
    give_weights(engine)
    return engine


def give_weights(engine: VllmEngine) -> None:
    """Version 0."""
    sizes = EngineParallel(engine.options.tensor_parallel, engine.options.expert_parallel)
    shape, live = ModelShape.from_hf_config(CONFIG), engine.parameters()
    here = dist.get_rank() % sizes.ranks
    weights = {n: t * 4 if "norm" not in n else t.abs() + 1 for n, t in random_weights(shape, 1).items()}
    stored = engine_weights(shape, engine_storage(shape, sizes, here, None, live), here, weights)
    assert stored.keys() == live.keys()
    for name, tensor in live.items():
        tensor.copy_(stored[name])
    engine.update_weights(0)


def ask(engine: VllmEngine, idle: int) -> list[GenerateRequest]:
    """Other numbers of requests for every engine, and of tokens for every request; none for engine `idle`."""
    count = 0 if engine.replica == idle else 1 + 2 * engine.replica
    return [
        GenerateRequest(
            SampleId(engine.replica, i, 0),
            (5, 6 + engine.replica, *range(i % 5), 7),
            Sampling(max_tokens=LONGEST - 3 * i % LONGEST, temperature=0.0, ignore_eos=True),
            i,
        )
        for i in range(count)
    ]


def rollouts(engine: VllmEngine) -> list:
    """The last engine without requests, then the first one."""
    return [generate(engine, ask(engine, idle), deadline=240) for idle in (engine.replicas - 1, 0)]


def check_same(shared: list, own: list) -> float:
    """Greedy tokens are equal; the largest difference between log-probs."""
    worst = 0.0
    for ours, theirs in zip(shared, own, strict=True):
        assert [c.tokens for c in ours] == [c.tokens for c in theirs]
        pairs = [(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x.logps, y.logps, strict=True)]
        worst = max([worst, *(abs(a - b) for a, b in pairs)])
    assert worst < AGREEMENT, worst
    return worst


def check_abort(engine: VllmEngine) -> None:
    """One engine gives up after two steps; the others end their responses."""
    whole = generate(engine, ask(engine, -1), deadline=240)
    engine.submit(ask(engine, -1))
    engine.poll(0)
    if engine.replica == 1:
        assert all(part.finish == "abort" for part in engine.abort())
        engine.keep_step()
        return
    done = []
    while engine._running:
        done += engine.poll(240)
    engine.keep_step()
    assert {c.id: c.tokens for c in done}.items() <= {c.id: c.tokens for c in whole}.items()


def check_deadline(ep: int) -> None:
    """The first rank of all does not come."""
    late = ExpertGroup(ep, 2.0)
    if 0 < dist.get_rank() < ep:
        with pytest.raises(TimeoutError, match=rf"rank {dist.get_rank()} .* 0 to {ep - 1}.* 2 s .*--rl-wait-timeout"):
            late.any_works(True)


def check_stall(engine: VllmEngine, ep: int) -> None:
    """The first rank of all stands still between two agreements; those that wait for it inside vLLM end."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()

    def end(status: int) -> None:
        assert status == 1
        print(f"rank {rank} passed: ended", flush=True)
        store.add("ended", 1)
        os._exit(0)

    engine._limit = HardDeadline(3.0, end)
    engine.submit(ask(engine, -1))
    for _ in range(3 if rank == 0 else AGREE_EVERY if rank < ep else 0):
        engine._step()
    while store.add("ended", 0) < ep - 1:
        time.sleep(0.1)


def main() -> None:
    dist.init_process_group("gloo")
    tp, ep = map(int, sys.argv[1:3])
    engine = build(tp, 1)
    own = rollouts(engine)
    engine.shutdown()
    engine = build(tp, ep)
    worst = check_same(rollouts(engine), own)
    check_abort(engine)
    engine.sleep()
    engine.wake()
    give_weights(engine)
    check_deadline(ep)
    dist.barrier()
    check_stall(engine, ep)
    print(f"rank {dist.get_rank()} passed: {worst:.1e} nats", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
