"""Run by test_export_processes.py under torchrun: an imported model in Megatron, trained, its log-probs kept.

Runs examples/pretrain_gpt.py as it is, with the arguments given after one of JSON: `out` (where log-probs of fixed
rows go, before and after training). With `generate` (tensor and expert parallel size of an engine) also resharded into
vLLM before the training, scored and decoded by both; `hf`: the Hugging Face directory, `limit`: nats, between engine
and trainer.
"""

import json
import runpy
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
from megatron.training import get_args, training  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from mindspeed_rl_plugin.engine import vllm_api  # noqa: E402
from mindspeed_rl_plugin.engine.hf_config import derive_config  # noqa: E402
from mindspeed_rl_plugin.engine.protocol import generate  # noqa: E402
from mindspeed_rl_plugin.forward import ForwardSettings  # noqa: E402
from mindspeed_rl_plugin.reshard.layout import EngineParallel, ModelShape, Parallel  # noqa: E402
from mindspeed_rl_plugin.reshard.resharder import Resharder  # noqa: E402
from mindspeed_rl_plugin.rows import GenerateRequest, Ragged, Rows, SampleId, Sampling  # noqa: E402
from mindspeed_rl_plugin.stages.logprobs import compute_logps  # noqa: E402

PROMPT, ANSWER = 9, 12


def rows(vocab: int, length: int) -> Rows:
    """Two rows of tokens, the same everywhere."""
    make = torch.Generator().manual_seed(7)
    tokens = [torch.randint(0, vocab, (length - 5 * i,), generator=make, dtype=torch.int32) for i in range(2)]
    return Rows(tuple(SampleId(0, i, 0) for i in range(2)), {"tokens": Ragged.from_rows(tokens)})


def own_copies(engine) -> int:
    """Tensors that are derived from weights as vllm-ascend keeps them: copies, which go stale, and not views."""
    count = 0
    for module in vllm_api.model(engine._engine).modules():
        for name in vllm_api.DERIVED:
            tensor = getattr(module, name, None)
            if isinstance(tensor, torch.Tensor):
                tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
                count += 1
    return count


def decode(engine, vocab: int):
    """Greedy answers to two prompts."""
    make = torch.Generator().manual_seed(11)
    sampling = Sampling(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    prompts = [tuple(torch.randint(0, vocab, (PROMPT - i,), generator=make).tolist()) for i in range(2)]
    requests = [GenerateRequest(SampleId(0, i, 0), prompt, sampling, i) for i, prompt in enumerate(prompts)]
    return prompts, generate(engine, requests, deadline=120)


def worst(left, right) -> float:
    return max(abs(a - b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True))


def check_engine(model, settings, job) -> None:
    args, (tp, ep) = get_args(), job["generate"]
    config = derive_config(args, vocab_size=args.vocab_size)
    options = VllmOptions(config, PROMPT + ANSWER, tp, ep, kv_cache_bytes=64 << 20, max_running=4)
    engine = VllmEngine(options)
    derived = own_copies(engine)
    assert (derived > 0) == bool(args.multi_latent_attention)
    shape = ModelShape.from_megatron_args(args, args.vocab_size)
    options = dict(rank=dist.get_rank(), engine_dtype=torch.float32, verify=True)
    way = Resharder(shape, Parallel.from_megatron_args(args), EngineParallel(tp, ep), **options)
    assert way.to_engine(model, engine.parameters(), 0).digest is not None
    engine.update_weights(0)
    prompts, ours = decode(engine, args.vocab_size)

    resharded = {name: t.clone() for name, t in engine.parameters().items()}
    for tensor in engine.parameters().values():
        tensor.fill_(torch.nan)
    files = sorted(Path(job["hf"]).glob("*.safetensors"))
    vllm_api.model(engine._engine).load_weights(pair for file in files for pair in load_file(file).items())
    for name, tensor in engine.parameters().items():
        padded = "embed_tokens" in name or "lm_head" in name  # rows that pad the vocabulary may differ
        real = max(0, args.vocab_size - dist.get_rank() % tp * len(tensor)) if padded else len(tensor)
        same = torch.equal(resharded[name][:real], tensor[:real])
        assert same, f"{name} is not what vLLM loads from the Hugging Face files"
    engine.update_weights(1)
    _, theirs = decode(engine, args.vocab_size)
    assert [c.tokens for c in ours] == [c.tokens for c in theirs]
    distance = worst([c.logps for c in ours], [c.logps for c in theirs])
    assert distance < 2e-5, f"engine resharded and engine loaded: {distance} nats"

    box = [[c.tokens for c in ours]]
    dist.broadcast_object_list(box, src=0)
    sequences = [torch.tensor([*p, *answer], dtype=torch.int32) for p, answer in zip(prompts, box[0], strict=True)]
    batch = Rows(tuple(c.id for c in ours), {"tokens": Ragged.from_rows(sequences)})
    scored = compute_logps(model, [batch], settings)
    if scored is not None and [c.tokens for c in ours] == box[0]:
        mine = [scored[0].row(i)[len(p) :].tolist() for i, p in enumerate(prompts)]
        first = worst([row[:1] for row in mine], [c.logps[:1] for c in ours])
        distance = worst(mine, [c.logps for c in ours])
        text = f"engine and trainer differ by {first:.1e} nats in first tokens and {distance:.1e} in all"
        assert distance < job["limit"], text
        print(text, flush=True)
    engine.shutdown()


def main() -> None:
    job, script, *argv = json.loads(sys.argv[1]), *sys.argv[2:]
    sys.argv = [script, *argv]
    train = training.train

    kept = []

    def trained(*positional, **named):
        model = named["model"] if "model" in named else next(a for a in positional if isinstance(a, list))
        args = get_args()
        settings = ForwardSettings.from_args(args, vocab_size=args.vocab_size, temperature=1.0)

        def keep():
            scored = compute_logps(model, [rows(args.vocab_size, args.seq_length)], settings)
            if scored is not None:
                kept.append([scored[0].row(i) for i in range(2)])

        keep()
        if "generate" in job:
            check_engine(model, settings, job)
        done = train(*positional, **named)
        keep()
        return done

    training.train = trained
    runpy.run_path(script, run_name="__main__")
    if kept:
        torch.save(kept, job["out"])


if __name__ == "__main__":
    main()
