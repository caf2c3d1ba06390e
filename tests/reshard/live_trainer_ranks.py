"""Run by test_reshard_live.py under torchrun: live Megatron models with experts against the layouts. Takes a family."""

import sys

from mindspeed_rl_plugin.host import activate_if_needed

activate_if_needed()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.training.argument_utils import gpt_config_from_args  # noqa: E402
from megatron.training.arguments import parse_and_validate_args  # noqa: E402
from megatron.training.initialize import initialize_megatron  # noqa: E402
from megatron.training.models.gpt import GPTModelBuilder  # noqa: E402

from mindspeed_rl_plugin.reshard.layout import ModelShape, Parallel, megatron_shapes  # noqa: E402
from mindspeed_rl_plugin.reshard.live import differences  # noqa: E402

PLAIN = (
    "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --seq-length 64 "
    "--max-position-embeddings 64 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --transformer-impl local --no-persist-layer-norm "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-rope-fusion "
    "--no-bias-dropout-fusion --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --train-iters 1 "
    "--eval-interval 1000 --eval-iters 0 --distributed-backend gloo --seed 1 --tokenizer-type NullTokenizer "
    "--vocab-size 200 --untie-embeddings-and-output-weights --qk-layernorm --num-experts 4 --moe-ffn-hidden-size 48 "
    "--moe-router-topk 2 --moe-token-dispatcher-type alltoall --tensor-model-parallel-size 2 --sequence-parallel"
)
FAMILIES = {
    "qwen3_moe": "--group-query-attention --num-query-groups 2 --kv-channels 16 "
    "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
    "deepseek_v3": "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 16 --rope-type rope --attention-backend unfused "
    "--moe-shared-expert-intermediate-size 96 --moe-layer-freq [0]+[1]*2 --moe-router-enable-expert-bias "
    "--moe-router-score-function sigmoid --expert-tensor-parallel-size 2",
}


def main(family: str) -> None:
    sys.argv = ["pretrain_gpt.py", *PLAIN.split(), *FAMILIES[family].split()]
    args = parse_and_validate_args()
    initialize_megatron()
    model = GPTModelBuilder(gpt_config_from_args(args)).build_model(ProcessGroupCollection.use_mpu_process_groups())
    shape = ModelShape.from_megatron_args(args, 200)
    assert shape.family == family
    # As saved: without counters that are no state, and without the empty extra states of linear layers.
    live = {name: value for name, value in model.state_dict().items() if torch.is_tensor(value)}
    wrong = differences(megatron_shapes(shape, Parallel.from_megatron_args(args), dist.get_rank()), live)
    assert not wrong, "\n".join(wrong)
    print(f"{len(live)} tensors agree", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
