"""Run by test_reshard_pairs.py under torchrun on one rank: a model of each family against its makers'.

Arguments: a folder for files, whose model, families. For each family files of a random model are written, and a model
gets their weights by the layout. megatron: the files are imported, their flags parsed by Megatron, and its own model is
built from them. vllm: an engine is built from the config that Megatron's arguments give, and samples. Prints
`FAMILY WORST` in nats: of the log-probs of all tokens, or of those that the engine reports.
"""

import json
import sys
from pathlib import Path

from mindspeed_rl_plugin.host import activate_if_needed

activate_if_needed()

if sys.argv[2] == "vllm":
    from mindspeed_rl_plugin.engine.options import VllmOptions
    from mindspeed_rl_plugin.engine.vllm_engine import VllmEngine
    from mindspeed_rl_plugin.host.engine_env import prepare_engine_env

    prepare_engine_env("cpu", sleep_mode=True)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from family_models import HOST, fill, random_model  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402
from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver  # noqa: E402
from megatron.training.arguments import core_transformer_config_from_args  # noqa: E402
from megatron_models import built, parsed  # noqa: E402

from mindspeed_rl_plugin.engine.hf_config import derive_config, normalized  # noqa: E402
from mindspeed_rl_plugin.engine.hf_rope import check_rotary  # noqa: E402
from mindspeed_rl_plugin.engine.rollout_engine import generate  # noqa: E402
from mindspeed_rl_plugin.layout.layout import EngineParallel, ModelShape, Parallel, engine_layout, megatron_layout  # noqa: E402
from mindspeed_rl_plugin.rows import GenerateRequest, SampleId, Sampling  # noqa: E402
from mindspeed_rl_plugin.tools.convert import to_megatron  # noqa: E402
from mindspeed_rl_plugin.tools.convert.arguments import megatron_arguments  # noqa: E402
from mindspeed_rl_plugin.tools.convert.checkpoint import Checkpoint  # noqa: E402
from mindspeed_rl_plugin.weights.live import engine_storage, stored_parameters, trainer_storage  # noqa: E402

VOCAB, LENGTH = 128, 24
PROMPT, ANSWER = 6, 16
RESOLVE = QKNormConfigResolver.resolve


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


def of_megatron(folder: Path, theirs) -> float:
    """Largest difference of log-probs, in nats."""
    QKNormConfigResolver.resolve = RESOLVE
    assert to_megatron.main(["--load", str(folder), "--out", str(folder / "ckpt"), "--train", "tp1"]) == 0
    args = parsed(Checkpoint(folder / "ckpt").args, HOST.split())
    args.padded_vocab_size = VOCAB
    shape = ModelShape.from_megatron_args(args, VOCAB)
    if args.multi_latent_attention and not args.q_lora_rank:
        QKNormConfigResolver.resolve = whole_queries
    model = built(args, core_transformer_config_from_args(args))
    live = stored_parameters([model])
    fill(live, megatron_layout(shape, Parallel(1), 0, *trainer_storage(shape, Parallel(1), 0, live)), folder)
    config = normalized(derive_config(args, vocab_size=VOCAB))
    for module in model.modules():
        if (rotary := getattr(module, "rotary_pos_emb", None)) is not None:
            check_rotary(config, rotary)
    tokens = torch.randint(0, VOCAB, (LENGTH,))
    mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    with torch.no_grad():
        logits = model(tokens[None], torch.arange(LENGTH)[None], mask)
    return (logits[0].double().log_softmax(-1) - theirs(tokens)).abs().max().item()


def of_vllm(folder: Path, theirs) -> float:
    """The same."""
    published = json.loads((folder / "config.json").read_text())
    shape = ModelShape.from_hf_config(published)
    config = derive_config(megatron_arguments(shape, Parallel(1), published), vocab_size=VOCAB)
    engine = VllmEngine(VllmOptions(config, 32, 1, 1, kv_cache_bytes=64 << 20, max_running=4))
    live = engine.parameters()
    fill(live, engine_layout(shape, engine_storage(shape, EngineParallel(), 0, live), 0), folder)
    engine.update_weights(0, "f" * 16)
    sampling = Sampling(max_tokens=ANSWER, temperature=1.0, ignore_eos=True)
    prompts = [tuple(torch.randint(0, VOCAB, (PROMPT,)).tolist()) for _ in range(4)]
    requests = [GenerateRequest(SampleId(0, i, 0), prompt, sampling, i) for i, prompt in enumerate(prompts)]
    worst = 0.0
    for prompt, done in zip(prompts, generate(engine, requests, deadline=120), strict=True):
        tokens = torch.tensor([*prompt, *done.tokens])
        expected = theirs(tokens)[:-1].gather(-1, tokens[1:, None])[PROMPT - 1 :, 0]
        worst = max(worst, (torch.tensor(list(done.logps)).double() - expected).abs().max().item())
    engine.shutdown()
    return worst


def main(scratch: Path, whose: str, families: list[str]) -> None:
    dist.init_process_group("gloo")
    if whose == "megatron":
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
    for family in families:
        torch.manual_seed(0)
        theirs = random_model(family, scratch / family, VOCAB)
        check = of_megatron if whose == "megatron" else of_vllm
        print(family, check(scratch / family, theirs), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
