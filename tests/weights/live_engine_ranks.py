"""Run by test_reshard_pairs.py under torchrun: parameters of vLLM's models with experts against the layouts."""

import json
import sys
from pathlib import Path

from mindspeed_rl_plugin.host import activate_if_needed

activate_if_needed()

import torch.distributed as dist  # noqa: E402
from transformers import AutoConfig  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.models import ModelRegistry  # noqa: E402

from mindspeed_rl_plugin.engine.hf_config import for_engine  # noqa: E402
from mindspeed_rl_plugin.engine.vllm_api import know_config  # noqa: E402
from mindspeed_rl_plugin.layout.families import FAMILIES  # noqa: E402
from mindspeed_rl_plugin.layout.layout import EngineParallel, ModelShape, engine_shapes  # noqa: E402
from mindspeed_rl_plugin.weights.live import differences, sizes_of  # noqa: E402

SIZES = dict(vocab_size=250, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=8)
EXPERTS = dict(moe_intermediate_size=48, num_experts_per_tok=2, max_position_embeddings=64, tie_word_embeddings=False)
AS_DEEPSEEK = dict(n_routed_experts=4, n_shared_experts=2, first_k_dense_replace=1, n_group=1, topk_group=1)
LATENT = dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, num_key_value_heads=8)
GROUPED = dict(num_key_value_heads=1, head_dim=32)
SPARSE = dict(num_experts=4, decoder_sparse_step=1, mlp_only_layers=[1])
CONFIGS = {
    "qwen3_moe": GROUPED | SPARSE,
    "qwen2_moe": SPARSE | dict(num_key_value_heads=1, shared_expert_intermediate_size=40),
    "mixtral": GROUPED | dict(num_local_experts=4),
    "glm4_moe": GROUPED | AS_DEEPSEEK | dict(attention_bias=True),
    "bailing_moe": GROUPED
    | dict(num_experts=4, num_shared_experts=2, first_k_dense_replace=1, n_group=1, topk_group=1, norm_topk_prob=True)
    | dict(rms_norm_eps=1e-5, rope_theta=10000.0)
    | FAMILIES["bailing_moe"].hf.fixed
    | FAMILIES["bailing_moe"].hf.written,
    "glm4_moe_355b": GROUPED | AS_DEEPSEEK | dict(attention_bias=True, use_qk_norm=True),
    "seed_oss": GROUPED | dict(attention_bias=True),
    "deepseek_v2": AS_DEEPSEEK | LATENT | dict(q_lora_rank=None, topk_method="greedy"),
    "deepseek_v2_236b": AS_DEEPSEEK | LATENT | dict(q_lora_rank=12, topk_method="group_limited_greedy"),
    "deepseek_v3": AS_DEEPSEEK | LATENT | dict(q_lora_rank=12, topk_method="noaux_tc", scoring_func="sigmoid"),
}


def main(scratch: Path) -> None:
    dist.init_process_group("gloo")
    rank, tp, started, count = dist.get_rank(), dist.get_world_size(), False, 0
    for family, sizes in CONFIGS.items():
        where = scratch / f"{family}-{rank}"
        kind = FAMILIES[family].model_type or family
        know_config(kind)
        AutoConfig.for_model(kind, **SIZES, **EXPERTS, **sizes).save_pretrained(where)
        config = json.loads((where / "config.json").read_text())
        shape = ModelShape.from_hf_config(config)
        config = for_engine(config | {"architectures": [shape.table.architecture]})
        (where / "config.json").write_text(json.dumps(config))
        for spread in (False, True) if shape.experts else (False,):
            settings = EngineArgs(
                model=str(where),
                skip_tokenizer_init=True,
                dtype="float32",
                enforce_eager=True,
                tensor_parallel_size=tp,
                enable_expert_parallel=spread,
                distributed_executor_backend="external_launcher",
            ).create_engine_config()
            with set_current_vllm_config(settings):
                if not started:
                    init_distributed_environment(tp, rank, "env://", rank, "gloo")
                    initialize_model_parallel(tp)
                    started = True
                model_class, _ = ModelRegistry.resolve_model_cls(config["architectures"], settings.model_config)
                live = sizes_of(dict(model_class(vllm_config=settings).named_parameters()))
            wrong = differences(engine_shapes(shape, EngineParallel(tp, tp if spread else 1), rank), live)
            assert not wrong, f"{family}, experts {'spread' if spread else 'cut'}:\n" + "\n".join(wrong)
            count += len(live)
    print(f"{count} tensors agree", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
