"""Run by test_reshard_pairs.py under torchrun: parameters of vLLM's models with experts against the layouts."""

import json
import sys
from pathlib import Path

from mindspeed_rl_plugin.host import activate_if_needed

activate_if_needed()

import torch.distributed as dist  # noqa: E402
from family_configs import CONFIGS  # noqa: E402
from transformers import AutoConfig  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.models import ModelRegistry  # noqa: E402

from mindspeed_rl_plugin.engine.hf_config import for_engine  # noqa: E402
from mindspeed_rl_plugin.engine.vllm_api import know_config  # noqa: E402
from mindspeed_rl_plugin.layout.families import FAMILIES  # noqa: E402
from mindspeed_rl_plugin.layout.layout import EngineParallel, ModelShape, engine_layout  # noqa: E402
from mindspeed_rl_plugin.weights.live import differences, sizes_of  # noqa: E402

SIZES = dict(vocab_size=250, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=8)
SIZES |= dict(max_position_embeddings=64, tie_word_embeddings=False, rms_norm_eps=1e-5, rope_theta=10000.0)
NAMES = "qwen3_moe qwen2_moe mixtral glm4_moe bailing_moe glm4_moe_355b seed_oss deepseek_v2-lite deepseek_v2_236b"


def sizes_of_family(name):
    """Of attention: key heads fewer than ranks where the family can have them; one dense layer in the middle."""
    sizes = CONFIGS[name] | dict(num_key_value_heads=8 if "kv_lora_rank" in CONFIGS[name] else 1)
    sizes |= dict(head_dim=32) if "head_dim" in sizes else {}
    return sizes | (dict(decoder_sparse_step=1, mlp_only_layers=[1]) if name.startswith("qwen") else {})


def main(scratch: Path) -> None:
    dist.init_process_group("gloo")
    rank, tp, started, count = dist.get_rank(), dist.get_world_size(), False, 0
    for name in [*NAMES.split(), "deepseek_v3"]:
        where, family = scratch / f"{name}-{rank}", name.removesuffix("-lite")
        kind = FAMILIES[family].model_type or family
        know_config(kind)
        sizes = SIZES | FAMILIES[family].hf.written | FAMILIES[family].hf.fixed | sizes_of_family(name)
        AutoConfig.for_model(kind, **sizes).save_pretrained(where)
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
            wrong = differences(engine_layout(shape, EngineParallel(tp, tp if spread else 1), rank).shapes, live)
            assert not wrong, f"{family}, experts {'spread' if spread else 'cut'}:\n" + "\n".join(wrong)
            count += len(live)
    print(f"{count} tensors agree", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
