"""Run by test_agreement.py under torchrun: log-probs of the engine against those of Megatron, in fp32.

Arguments: model family, generation tensor parallel size. Training is tensor parallel over all ranks.
"""

from __future__ import annotations

import sys

from mindspeed_rl_plugin.host import activate_if_needed

activate_if_needed()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.training.argument_utils import gpt_config_from_args  # noqa: E402
from megatron.training.arguments import parse_and_validate_args  # noqa: E402
from megatron.training.initialize import initialize_megatron  # noqa: E402
from megatron.training.models.gpt import GPTModelBuilder  # noqa: E402

from mindspeed_rl_plugin.engine.hf_config import check_rotary, derive_config  # noqa: E402
from mindspeed_rl_plugin.engine.protocol import generate  # noqa: E402
from mindspeed_rl_plugin.engine.vllm_engine import VllmEngine, VllmOptions  # noqa: E402
from mindspeed_rl_plugin.forward.head import token_logps  # noqa: E402
from mindspeed_rl_plugin.reshard.layout import ModelShape, Parallel  # noqa: E402
from mindspeed_rl_plugin.reshard.resharder import Resharder  # noqa: E402
from mindspeed_rl_plugin.rows import GenerateRequest, SampleId, Sampling  # noqa: E402

VOCAB, LENGTH, LIMIT = 200, 40, 2e-5
PLAIN = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 128 --seq-length 64 --max-position-embeddings 64 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 "
    "--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-bias-swiglu-fusion --no-rope-fusion --no-bias-dropout-fusion --micro-batch-size 1 --global-batch-size 4 "
    "--lr 1e-3 --train-iters 1 --eval-interval 1000 --eval-iters 0 --distributed-backend gloo --seed 1 "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCAB}"
)
FAMILIES = {
    "qwen2": "--add-qkv-bias --untie-embeddings-and-output-weights --rotary-base 1000000 --norm-epsilon 1e-6",
    "qwen3": "--qk-layernorm --kv-channels 48",
    "llama": "--untie-embeddings-and-output-weights --use-rope-scaling --rotary-base 500000",
}


def build():
    """Megatron's parsed arguments and its model, as `pretrain` would make them."""
    args = parse_and_validate_args()
    initialize_megatron()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = GPTModelBuilder(gpt_config_from_args(args)).build_model(groups)
    return args, model.eval()


@torch.no_grad()
def move_weights(model, seed: int) -> None:
    """Add noise of the size of a real model's weights; shards differ, what ranks share stays equal."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    for i, parameter in enumerate(model.parameters()):
        shard = getattr(parameter, "tensor_model_parallel", False)
        generator = torch.Generator().manual_seed(1000 * seed + 10 * i + (rank if shard else 9))
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


@torch.no_grad()
def trainer_logps(model, request, completion) -> torch.Tensor:
    """`[R]` log-probs of a response by Megatron's forward pass."""
    tokens = torch.tensor([*request.prompt_tokens, *completion.tokens])[None]
    logits = model(tokens, torch.arange(tokens.shape[1])[None], None)
    group = parallel_state.get_tensor_model_parallel_group()
    logps, _ = token_logps(
        logits[:, :-1], tokens[:, 1:], vocab_size=VOCAB, temperature=request.sampling.temperature, tp_group=group
    )
    return logps[0, len(request.prompt_tokens) - 1 :]


def worst(model, engine) -> float:
    """Largest difference over 12 responses at two temperatures. Each response is checked by all trainer ranks."""
    requests = [
        GenerateRequest(SampleId(0, i, 0), (3, 10 + i, *range(i)), Sampling(LENGTH, temperature=1.0 - 0.3 * (i % 2)), i)
        for i in range(12)
    ]
    drawn = generate(engine, requests, deadline=60)
    if engine.replicas > 1:  # every engine drew all of them: from equal weights, hence the same
        box = [drawn]
        dist.broadcast_object_list(box, src=0)
        assert [c.tokens for c in box[0]] == [c.tokens for c in drawn]
    return max(
        float((trainer_logps(model, r, c) - torch.tensor(c.logps)).abs().max())
        for r, c in zip(requests, drawn, strict=True)
    )


def main(family: str, tp: int, world: int) -> None:
    sys.argv = ["pretrain_gpt.py", *PLAIN.split(), *FAMILIES[family].split()]
    sys.argv += ["--tensor-model-parallel-size", str(world)]
    args, model = build()
    config = derive_config(args, vocab_size=VOCAB)
    assert config["model_type"] == family
    check_rotary(config, model.rotary_pos_emb.inv_freq)
    engine = VllmEngine(VllmOptions(config, LENGTH + 16, tensor_parallel=tp, kv_cache_bytes=32 << 20, max_running=12))
    resharder = Resharder(
        ModelShape.from_megatron_args(args, VOCAB),
        Parallel.from_megatron_args(args),
        tp,
        rank=dist.get_rank(),
        engine_dtype=torch.float32,
    )
    for updates in range(3):
        move_weights(model, updates)
        if updates:
            stale = worst(model, engine)
            assert stale > 0.1, f"old weights of the engine pass for new ones: {stale}"
            engine.sleep()
            engine.wake(("weights",))
        resharder.to_engine([model], engine.parameters(), updates)
        engine.update_weights(updates)
        engine.wake(("kv_cache",))
        difference = worst(model, engine)
        print(f"rank {dist.get_rank()} {family} tp {tp} updates {updates}: {difference:.2e}", flush=True)
        assert difference < LIMIT, difference
    engine.shutdown()
    dist.barrier()
    print("agreed", flush=True)


if __name__ == "__main__":
    import os

    main(sys.argv[1], int(sys.argv[2]), int(os.environ["WORLD_SIZE"]))
