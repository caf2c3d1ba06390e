"""Run by test_reshard_pairs.py under torchrun on one rank: Megatron's own model of each family against its makers'.

Arguments: a folder for files, families. Files of a random model are imported, their flags parsed by Megatron, and the
model that it builds from them gets the weights; prints `FAMILY WORST` in nats, of log-probs of all tokens.
"""

import sys
from pathlib import Path

from mindspeed_rl_plugin.host import activate_if_needed

activate_if_needed()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from family_models import HOST, random_model  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402
from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver  # noqa: E402
from megatron.training.arguments import core_transformer_config_from_args  # noqa: E402
from megatron_models import built, parsed  # noqa: E402

from mindspeed_rl_plugin.engine.hf_config import derive_config, normalized  # noqa: E402
from mindspeed_rl_plugin.engine.hf_rope import check_rotary  # noqa: E402
from mindspeed_rl_plugin.reshard.layout import ModelShape, Parallel, megatron_layout  # noqa: E402
from mindspeed_rl_plugin.reshard.live import stored_parameters, trainer_storage  # noqa: E402
from mindspeed_rl_plugin.tools.convert import to_megatron  # noqa: E402
from mindspeed_rl_plugin.tools.convert.checkpoint import Checkpoint  # noqa: E402
from mindspeed_rl_plugin.tools.convert.files import open_tensors  # noqa: E402

VOCAB, LENGTH = 128, 24


def whole_queries(self):
    """Modules of latent attention without query compression, as core 0.12 has them; 0.19 wants a norm of its own."""
    given = self.submodules
    norms = dict(q_layernorm=IdentityOp, kv_layernorm=given.kv_layernorm)
    return self._result(
        linear_q_proj=given.linear_q_proj,
        linear_q_up_proj=IdentityOp,
        linear_kv_up_proj=given.linear_kv_up_proj,
        **norms,
    )


def check(family: str, folder: Path) -> float:
    """Largest difference of log-probs, in nats."""
    torch.manual_seed(0)
    theirs = random_model(family, folder / "hf", VOCAB)
    assert to_megatron.main(["--load", str(folder / "hf"), "--out", str(folder / "ckpt"), "--train", "tp1"]) == 0
    args = parsed(Checkpoint(folder / "ckpt").args, HOST.split())
    args.padded_vocab_size = VOCAB
    shape, source = ModelShape.from_megatron_args(args, VOCAB), open_tensors(folder / "hf")
    if args.multi_latent_attention and not args.q_lora_rank:
        QKNormConfigResolver.resolve = whole_queries
    model = built(args, core_transformer_config_from_args(args))
    live = stored_parameters([model])
    for name, segments in megatron_layout(shape, Parallel(1), 0, *trainer_storage(shape, Parallel(1), 0, live)).items():
        for s in segments:
            at = (slice(None),) * s.axis + (slice(s.start, s.stop),)
            s.view(live[name], s.start, s.size).copy_(source[s.name][at])
    config = normalized(derive_config(args, vocab_size=VOCAB))
    for module in model.modules():
        if (rotary := getattr(module, "rotary_pos_emb", None)) is not None:
            check_rotary(config, rotary)
    tokens = torch.randint(0, VOCAB, (LENGTH,))
    mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    with torch.no_grad():
        logits = model(tokens[None], torch.arange(LENGTH)[None], mask)
    return (logits[0].double().log_softmax(-1) - theirs(tokens)).abs().max().item()


def main(scratch: Path, families: list[str]) -> None:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    own = QKNormConfigResolver.resolve
    for family in families:
        QKNormConfigResolver.resolve = own
        (scratch / family).mkdir()
        print(family, check(family, scratch / family), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
