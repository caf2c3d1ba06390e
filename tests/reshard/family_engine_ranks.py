"""Run by test_reshard_pairs.py under torchrun on one rank: vLLM's model of a family against its makers'.

Arguments: a folder for files, the family. An engine is built from the config that Megatron's arguments give, gets the
weights of the files by the layout, and samples; prints `FAMILY WORST` in nats, of the log-probs that it reports.
"""

import json
import sys
from pathlib import Path

from mindspeed_rl_plugin.host import activate_if_needed

activate_if_needed()

from mindspeed_rl_plugin.engine.options import VllmOptions  # noqa: E402
from mindspeed_rl_plugin.engine.vllm_engine import VllmEngine  # noqa: E402
from mindspeed_rl_plugin.host.engine_env import prepare_engine_env  # noqa: E402

prepare_engine_env("cpu", sleep_mode=True)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from family_models import random_model  # noqa: E402

from mindspeed_rl_plugin.engine.hf_config import derive_config  # noqa: E402
from mindspeed_rl_plugin.engine.protocol import generate  # noqa: E402
from mindspeed_rl_plugin.reshard.layout import EngineParallel, ModelShape, Parallel, engine_layout  # noqa: E402
from mindspeed_rl_plugin.reshard.live import engine_storage  # noqa: E402
from mindspeed_rl_plugin.rows import GenerateRequest, SampleId, Sampling  # noqa: E402
from mindspeed_rl_plugin.tools.convert.arguments import megatron_arguments  # noqa: E402
from mindspeed_rl_plugin.tools.convert.files import open_tensors  # noqa: E402

VOCAB, PROMPT, ANSWER = 128, 6, 16


def loaded(folder: Path) -> VllmEngine:
    """An engine of the model in these files."""
    published, source = json.loads((folder / "config.json").read_text()), open_tensors(folder)
    shape = ModelShape.from_hf_config(published)
    config = derive_config(megatron_arguments(shape, Parallel(1), published), vocab_size=VOCAB)
    engine = VllmEngine(VllmOptions(config, 32, 1, 1, kv_cache_bytes=64 << 20, max_running=4))
    live = engine.parameters()
    way = engine_storage(shape, EngineParallel(), 0, None, live)
    for name, segments in engine_layout(shape, way, 0).items():
        for s in segments:
            at = (slice(None),) * s.axis + (slice(s.start, s.stop),)
            s.view(live[name], s.start, s.size).copy_(source[s.name][at])
    engine.update_weights(0, "f" * 16)
    return engine


def main(scratch: Path, family: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    theirs = random_model(family, scratch / "hf", VOCAB)
    engine, sampling = loaded(scratch / "hf"), Sampling(max_tokens=ANSWER, temperature=1.0, ignore_eos=True)
    prompts = [tuple(torch.randint(0, VOCAB, (PROMPT,)).tolist()) for _ in range(4)]
    requests = [GenerateRequest(SampleId(0, i, 0), prompt, sampling, i) for i, prompt in enumerate(prompts)]
    worst = 0.0
    for prompt, done in zip(prompts, generate(engine, requests, deadline=120), strict=True):
        tokens = torch.tensor([*prompt, *done.tokens])
        expected = theirs(tokens)[:-1].gather(-1, tokens[1:, None])[PROMPT - 1 :, 0]
        worst = max(worst, (torch.tensor(list(done.logps)).double() - expected).abs().max().item())
    print(family, worst, flush=True)
    engine.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
