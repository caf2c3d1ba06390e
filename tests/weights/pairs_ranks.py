"""Run by test_reshard_pairs.py under torchrun: one vLLM engine, and trainers in several layouts, one after the other.

Argument: JSON {"family", "generate": [tp, ep], "cases": [...], "limit"}; where generate is null only the names of what
is stored are compared. Else for each case a model is trained twice: without a swap, and with a whole rollout around
each step. Weights in the engine are compared bitwise with a reference that shares nothing with the package, log-probs
of its answers with the trainer's, training state with that of the first run. Rank 0 prints `passed NAME WORST` a case,
the second in nats.
"""

import json
import re
import sys
from types import SimpleNamespace

from mindspeed_rl_plugin.host import activate_if_needed

activate_if_needed()

from mindspeed_rl_plugin.engine.options import VllmOptions  # noqa: E402
from mindspeed_rl_plugin.engine.vllm_engine import VllmEngine  # noqa: E402
from mindspeed_rl_plugin.host.engine_env import prepare_engine_env  # noqa: E402

prepare_engine_env("cpu", sleep_mode=True)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core import tensor_parallel  # noqa: E402
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher  # noqa: E402
from megatron_models import described  # noqa: E402
from reshard_ranks import BUCKET, SEQ, Job, same  # noqa: E402
from reshard_reference import E_BIAS, engine_weights, random_weights  # noqa: E402

from mindspeed_rl_plugin.engine.hf_config import derive_config  # noqa: E402
from mindspeed_rl_plugin.engine.protocol import generate  # noqa: E402
from mindspeed_rl_plugin.host.streams import NullStream  # noqa: E402
from mindspeed_rl_plugin.layout.layout import EngineParallel, ModelShape, Parallel  # noqa: E402
from mindspeed_rl_plugin.rows import GenerateRequest, SampleId, Sampling  # noqa: E402
from mindspeed_rl_plugin.weights.live import stored_parameters, trainer_storage  # noqa: E402
from mindspeed_rl_plugin.weights.offload import TrainState, gathered  # noqa: E402
from mindspeed_rl_plugin.weights.resharder import Resharder  # noqa: E402
from mindspeed_rl_plugin.weights.storages import unwrap  # noqa: E402

VOCAB, PROMPT, ANSWER, STEPS = 256, 5, 8, 3  # a vocabulary that nobody pads
LATENT = dict(q_lora=24, kv_lora=512, nope=128, rope=64, value=128)
EXPERTS = dict(experts=4, expert_ffn=48, dense_layers=(0,))


def shape_of(family: str) -> ModelShape:
    if family == "deepseek_v3":
        more = EXPERTS | LATENT | dict(shared_ffn=96)
        return ModelShape(family, 4, 64, 4, 4, 192, 96, VOCAB, VOCAB, **more)
    return ModelShape(family, 4, 64, 4, 2, 32, 96, VOCAB, VOCAB, **EXPERTS if family == "qwen3_moe" else {})


def start_weights(shape: ModelShape) -> dict[str, torch.Tensor]:
    """Values of usual sizes, among them a router bias that is not zero."""
    raw = random_weights(shape)
    if not shape.table.experts:
        return raw
    return {name: 1 + 2 * t if "norm" in name else 2 * t for name, t in raw.items()}


class PairJob(Job):
    """A trainer of any family, experts and latent attention included."""

    def _shape(self):
        return shape_of(self.case.family)

    def _parallel(self):
        c = self.case
        return Parallel(dist.get_world_size(), tp=c.tp, pp=c.pp, vpp=c.vpp, ep=c.ep, etp=c.etp)

    def _arguments(self):
        args = super()._arguments()
        args.sequence_parallel = self.shape.table.experts and self.case.tp > 1
        args.moe_router_bias_update_rate = 0.03
        return args

    def logps(self, tokens):
        """Log-prob `[B, SEQ]` of each next token, on the last pipeline stage; None elsewhere."""
        kept = []

        def keep(loss):
            kept.append(-loss.float())
            return loss.float().mean(), {}

        with torch.no_grad():
            self.forward(tokens.chunk(2), keep, forward_only=True)
        return torch.cat(kept) if kept else None


class Grouped:
    """A model chunk whose experts Megatron's grouped GEMM would keep: two flat parameters for all of a rank."""

    def __init__(self, chunk):
        self.model = unwrap(chunk)
        self.named_buffers = self.model.named_buffers

    def named_parameters(self):
        stacks = {}
        for name, t in self.model.named_parameters():
            match = re.fullmatch(r"(.*mlp\.experts\.)local_experts\.\d+\.linear_fc(\d)\.weight", name)
            if match:
                stacks.setdefault((match[1], match[2]), []).append(t.data.t())
            else:
                yield name, t
        for (where, number), parts in stacks.items():
            stacked = torch.stack(parts)  # [experts, H, 2F], or [experts, F, H]
            flat = stacked.reshape(stacked.shape[1], -1) if number == "1" else stacked.flatten(0, 1)
            yield f"{where}weight{number}", flat


def check_half(job, sizes, like) -> None:
    """Into an engine of bfloat16, where the router's bias is as wide as in the trainer and goes over the wire so."""
    weights = {n: t if n.endswith(E_BIAS) else t.bfloat16() for n, t in job.canonical(like).items()}
    expected = engine_weights(job.shape, sizes, dist.get_rank() % sizes.ranks, weights)
    live = {name: torch.zeros_like(t) for name, t in expected.items()}
    options = dict(engine_dtype=torch.bfloat16, bucket_bytes=BUCKET, verify=True)
    Resharder(job.shape, job.parallel, sizes, rank=dist.get_rank(), **options).to_engine(job.chunks, live, 0)
    for name, tensor in expected.items():
        assert live[name].dtype == tensor.dtype and torch.equal(live[name], tensor), f"{name} differs in bfloat16"


def answers(engine) -> list:
    """Greedy answers of this rank's engine to four prompts: (all tokens, log-probs of the answer)."""
    make = torch.Generator().manual_seed(engine.replica)
    sampling = Sampling(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    prompts = [tuple(torch.randint(0, VOCAB, (PROMPT,), generator=make).tolist()) for _ in range(4)]
    requests = [GenerateRequest(SampleId(0, i, 0), prompt, sampling, i) for i, prompt in enumerate(prompts)]
    done = generate(engine, requests, deadline=120)
    return [([*p, *c.tokens], list(c.logps)) for p, c in zip(prompts, done, strict=True)]


def rollout(job, state, engine, way, like, version) -> list:
    """What an RL iteration does around generation; the engine's weights are the trainer's, bitwise."""
    with gathered(job.chunks):
        before = job.snapshot()
        state.offload(["grads", "optimizer"])
        engine.wake(("weights",))
        weights = job.canonical(like)
        chunks = [Grouped(c) for c in job.chunks] if job.case.grouped else job.chunks
        way.to_engine(chunks, engine.parameters(), version)
        here, live = dist.get_rank() % way.engine.ranks, engine.parameters()
        expected = engine_weights(job.shape, way.engine, here, weights)
        assert expected.keys() == live.keys()
        for name, tensor in expected.items():
            assert torch.equal(live[name], tensor), f"{name} differs in the engine"
        engine.update_weights(version)
        state.offload(["params"])
        engine.wake(("kv_cache",))
        responses = answers(engine)
        engine.sleep()
        state.onload()
        assert same(before, job.snapshot()), "a swap changed training state"
    return responses


def distance(job, responses) -> float:
    """Largest difference between the log-probs of all engines and the trainer's, nats; 0 where no rank scores."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, responses)
    rows = [row for each in everyone for row in each]
    tokens = torch.zeros(len(rows), SEQ, dtype=torch.long)
    for i, (row, _) in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
    with gathered(job.chunks):
        scored = job.logps(tokens)
    if scored is None:
        return 0.0
    return float((scored[:, PROMPT - 1 : PROMPT + ANSWER - 1] - torch.tensor([logps for _, logps in rows])).abs().max())


def check_names(case) -> None:
    """Live Megatron stores what the family's table says."""
    initialize(case)
    job = PairJob(case, start_weights(shape_of(case.family)))
    trainer_storage(job.shape, job.parallel, dist.get_rank(), stored_parameters(job.chunks))
    print("passed names", flush=True)


def initialize(case) -> None:
    size = dict(expert_model_parallel_size=case.ep, expert_tensor_parallel_size=case.etp)
    mpu.initialize_model_parallel(case.tp, case.pp, case.vpp if case.vpp > 1 else None, **size)
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def check_case(case, engine, sizes, limit) -> None:
    initialize(case)
    weights = start_weights(shape_of(case.family))
    plain = PairJob(case, weights)
    for step in range(STEPS - 1):
        plain.train_step(step)
    job = PairJob(case, weights)
    state = TrainState(job.chunks, job.optimizer)
    options = dict(engine_dtype=torch.float32, bucket_bytes=BUCKET, verify=True)
    way = Resharder(job.shape, job.parallel, sizes, rank=dist.get_rank(), **options)
    worst, seen = 0.0, []
    for step in range(STEPS):
        responses = rollout(job, state, engine, way, weights, step)
        worst = max(worst, distance(job, responses))
        seen.append(json.dumps([logps for _, logps in responses]))
        if step < STEPS - 1:
            job.train_step(step)
    assert len(set(seen)) == STEPS, "an update changed no log-prob"
    with gathered(job.chunks):
        check_half(job, sizes, weights)
    assert same(plain.snapshot(), job.snapshot()), "training differs from the run without rollouts"
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, worst)
    assert 0 < max(every) < limit, f"{case.name}: engine and trainer differ by {max(every)} nats"
    if dist.get_rank() == 0:
        print(f"passed {case.name} {max(every):.1e}", flush=True)
    mpu.destroy_model_parallel()


def main() -> None:
    job = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    # As in the loop, where it is made before the engine: vLLM on CPU replaces torch.cuda.Stream, which has events, by a
    # class without any. In ranks that start warm it has done so.
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = NullStream()
    defaults = dict(tp=1, pp=1, vpp=1, ep=1, etp=None, distributed=False, overlap=False, grouped=False, tied=False)
    named = dict(family=job["family"], dtype="float32", **defaults)
    cases = [SimpleNamespace(**named | case) for case in job["cases"]]
    if job["generate"] is None:
        check_names(*cases)
        return
    tp, ep = job["generate"]
    config = derive_config(described(shape_of(job["family"]), Parallel(1)), vocab_size=VOCAB)
    options = VllmOptions(config, SEQ, tp, ep, kv_cache_bytes=64 << 20, max_running=4)
    engine = VllmEngine(options)
    engine.sleep()
    for case in cases:
        check_case(case, engine, EngineParallel(tp, ep), job["limit"])
    engine.wake()
    engine.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
