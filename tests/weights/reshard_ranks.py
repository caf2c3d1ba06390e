"""Run by test_reshard_processes.py under torchrun: real Megatron models, resharded and swapped while they train.

Argument: JSON list of cases. Rank 0 prints one line `passed NAME` a case. A case names the layout; what is compared is
computed by reshard_reference.py, which does not use the package's layouts. At the end ranks are lost.
"""

import contextlib
import json
import os
import sys
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist

from mindspeed_rl_plugin.host import activate_if_needed

activate_if_needed()

import hostile  # noqa: E402
from family_models import HOST  # noqa: E402
from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core import tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.training.arguments import core_transformer_config_from_args  # noqa: E402
from megatron_models import built, described, parsed  # noqa: E402
from reshard_reference import collected, engine_weights, megatron_weights, random_weights  # noqa: E402

from mindspeed_rl_plugin.layout.layout import EngineParallel, ModelShape, Parallel  # noqa: E402
from mindspeed_rl_plugin.tools.plan.estimate import weights_by_layer  # noqa: E402
from mindspeed_rl_plugin.weights.host_memory import HostMemoryBudget, HostWeights  # noqa: E402
from mindspeed_rl_plugin.weights.live import stored_parameters  # noqa: E402
from mindspeed_rl_plugin.weights.offload import TrainState, gathered  # noqa: E402
from mindspeed_rl_plugin.weights.p2p import P2PChannel  # noqa: E402
from mindspeed_rl_plugin.weights.resharder import Resharder  # noqa: E402
from mindspeed_rl_plugin.weights.storages import unwrap  # noqa: E402

SEQ, MICRO_BATCHES, BUCKET = 16, 2, 16 << 10
DEFAULTS = dict(family="qwen2", tied=False, tp=1, pp=1, vpp=1, distributed=False, overlap=False, generate=[1])
DEFAULTS |= dict(dtype="float32", engine_dtype="float32")


def shape_of(case):
    return ModelShape(case.family, 4, 64, 4, 2, 32, 96, 250, 256, case.tied)


class Job:
    """A model, its optimizer and its data, in the layout of a case."""

    def __init__(self, case, weights):
        self.case, self.shape, self.dtype = case, shape_of(case), getattr(torch, case.dtype)
        self.parallel = Parallel(dist.get_world_size(), tp=case.tp, pp=case.pp, vpp=case.vpp)
        bf16 = self.dtype == torch.bfloat16
        flags = [*HOST.split(), "--attention-softmax-in-fp32", "--use-cpu-initialization", *["--bf16"] * bf16]
        args = parsed(described(self.shape, self.parallel), flags)
        self.config = core_transformer_config_from_args(args)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.chunks = self._chunks(args)
        mine, live = self.stored(dist.get_rank(), weights), stored_parameters(self.chunks)
        assert set(mine) == set(live), set(mine) ^ set(live)
        for name, value in mine.items():
            live[name].copy_(value)
        if case.overlap:
            assert all(chunk.remove_forward_pre_hook_handles for chunk in self.chunks)
            self.config.no_sync_func = self.chunks[0].no_sync
        sizes = dict(use_distributed_optimizer=case.distributed, overlap_param_gather=case.overlap)
        config = OptimizerConfig(optimizer="adam", lr=1e-2, bf16=bf16, params_dtype=self.dtype, clip_grad=1.0, **sizes)
        self.optimizer = get_megatron_optimizer(config, self.chunks)
        self.optimizer.reload_model_params()

    def _chunks(self, args):
        first, last = mpu.is_pipeline_first_stage, mpu.is_pipeline_last_stage
        out = []
        for v in range(self.case.vpp):
            stage = v if self.case.vpp > 1 else None
            ends = dict(ignore_virtual=False, vp_stage=stage)
            model = built(args, self.config, pre_process=first(**ends), post_process=last(**ends), vp_stage=stage)
            model = Float16Module(self.config, model) if self.config.bf16 else model
            ddp = DistributedDataParallelConfig(
                use_distributed_optimizer=self.case.distributed,
                overlap_param_gather=self.case.overlap,
                overlap_grad_reduce=self.case.overlap,
                grad_reduce_in_fp32=True,
            )
            out.append(DistributedDataParallel(self.config, ddp, model, disable_bucketing=v > 0))
        return out

    def stored(self, rank, weights):
        """What a rank of this layout stores of a canonical model."""
        return megatron_weights(self.shape, self.parallel, rank, weights)

    def canonical(self, like):
        """The canonical model, with the names of `like`, out of all ranks' live tensors."""
        return collected(stored_parameters(self.chunks), self.stored, like)

    def _run(self, step, forward_only):
        def forward(iterator, model):
            tokens = next(iterator)
            mask, position = torch.ones(1, 1, SEQ, SEQ).triu(1).bool(), torch.arange(SEQ)[None].expand_as(tokens)
            losses = model(tokens, position, mask, labels=tokens.roll(-1, 1))
            return losses, lambda loss: (loss.float().mean(), {})

        make = torch.Generator().manual_seed(100 * step + mpu.get_data_parallel_rank())
        batches = [torch.randint(0, 250, (2, SEQ), generator=make) for _ in range(MICRO_BATCHES)]
        iterators = [iter(batches) for _ in self.chunks]
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks,
            num_microbatches=len(batches),
            seq_length=SEQ,
            micro_batch_size=len(batches[0]),
            forward_only=forward_only,
        )

    def train_step(self, step):
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._run(step, forward_only=False)
        assert self.optimizer.step()[0]

    def score(self, step):
        with torch.no_grad():
            self._run(step, forward_only=True)

    def optimizer_tensors(self):
        """Main parameters and moments in a fixed order."""
        out = []
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for group in part.optimizer.param_groups:
                for p in group["params"]:
                    out += [p.data, *(t for _, t in sorted(part.optimizer.state[p].items()) if torch.is_tensor(t))]
        return out

    def on_device(self):
        """Bytes of training state; Adam's counters of steps live on the host."""
        tensors = [t for t in self.optimizer_tensors() if t.numel() > 1]
        for chunk in self.chunks:
            tensors += [t for b in chunk.buffers for t in (b.grad_data, b.param_data) if t is not None]
            tensors += [t for p in unwrap(chunk).parameters() for t in (p.data, p.grad, p.main_grad) if t is not None]
            tensors += unwrap(chunk).buffers()
        return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())

    def snapshot(self):
        with gathered(self.chunks):
            tensors = [*stored_parameters(self.chunks).values(), *self.optimizer_tensors()]
            return [t.clone() for t in tensors]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def empty_engine(shape, engine, dtype=torch.float32):
    """Parameters of this rank's engine."""
    expected = engine_weights(shape, engine, dist.get_rank() % engine.ranks, random_weights(shape, dtype=dtype))
    return {name: torch.zeros_like(t) for name, t in expected.items()}


def cycle(job, weights, state, reference, first, resharder, engine, version):
    """What one RL iteration does around generation."""
    state.start_offload(["grads", "optimizer"])
    before = job.snapshot()  # as a checkpoint reads it
    with gathered(job.chunks):
        state.finish_offload()
        expected = {name: t.to(resharder.dtype) for name, t in job.canonical(weights).items()}
        expected = engine_weights(job.shape, resharder.engine, dist.get_rank() % resharder.engine.tp, expected)
        done = resharder.to_engine(job.chunks, engine, version)
        assert done.temporary <= 2 * BUCKET
        for name, tensor in expected.items():
            assert torch.equal(engine[name], tensor), f"{name} differs in the engine"
        state.offload(["params"])
        assert not job.on_device()
        state.onload(["params"])
        state.start_onload(["optimizer"])
        with reference.swapped_into(job.chunks):
            assert same([p.clone() for p in stored_parameters(job.chunks).values()], first)
            job.score(version)
        state.onload()
    assert same(before, job.snapshot()), "a swap changed training state"
    return done


def check_case(case):
    mpu.initialize_model_parallel(case.tp, case.pp, case.vpp if case.vpp > 1 else None)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    weights = random_weights(shape_of(case))
    plain = Job(case, weights)
    for step in range(3):
        plain.train_step(step)

    job = Job(case, weights)
    reference = HostWeights.capture(job.chunks)
    first = [p.clone() for p in stored_parameters(job.chunks).values()]
    budget = HostMemoryBudget.of_machine(dist.get_world_size(), 60.0)
    state = TrainState(job.chunks, job.optimizer, budget=budget, verify=True)
    dtype = getattr(torch, case.engine_dtype)
    engines = []
    options = dict(rank=dist.get_rank(), engine_dtype=dtype, bucket_bytes=BUCKET, verify=True)
    for engine in map(EngineParallel, case.generate):
        way = Resharder(job.shape, job.parallel, engine, **options)
        engines.append((way, empty_engine(job.shape, engine, dtype)))
    digests = []
    for step in range(3):
        digests.append({cycle(job, weights, state, reference, first, *engine, step).digest for engine in engines})
        job.train_step(step)
    assert all(len(d) == 1 for d in digests), digests  # one model, one digest, whatever the engine's layout
    assert len(set.union(*digests)) == 3  # and another one after each update
    assert same(plain.snapshot(), job.snapshot()), "training differs from the run without swaps"
    for stream, engine in engines:
        other, whole = empty_engine(job.shape, stream.engine, dtype), weights_by_layer(job.shape, dtype.itemsize).sum()
        way = Resharder(job.shape, job.parallel, stream.engine, mode="allgather", **options)
        with gathered(job.chunks):
            stream.to_engine(job.chunks, engine, 3)
            done = way.to_engine(job.chunks, other, 3)
        assert same([*engine.values()], [*other.values()]), "the modes differ"
        assert whole <= done.temporary <= 1.02 * whole, (done.temporary, whole)
    if dist.get_rank() == 0:
        print(f"passed {case.name} digest {sorted(digests[0])[0]}", flush=True)
    mpu.destroy_model_parallel()


def check_lost_ranks(case):
    """A peer that never comes, and one that dies in the middle, end in a message that names bucket and peer."""
    mpu.initialize_model_parallel(case.tp, case.pp)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    job = Job(case, random_weights(shape_of(case)))
    engine = empty_engine(job.shape, EngineParallel())
    options = dict(rank=dist.get_rank(), engine_dtype=torch.float32, bucket_bytes=BUCKET)
    groups = [dist.new_group() for _ in range(3)]  # a lost message breaks the connections of its group
    ways = [
        Resharder(job.shape, job.parallel, EngineParallel(), group=group, deadline=deadline, **options)
        for group, deadline in zip(groups, (2.0, 2.0, 20.0), strict=True)
    ]
    for way in ways:
        way.to_engine(job.chunks, engine, 0)
    late, slow, dead = ways
    if dist.get_rank() == 0:
        expect(TimeoutError, "rank 0 waited 2 s for the check of the weights from or to ranks [1]", late, job, engine)
        expect(TimeoutError, "rank 0 waited 2 s for bucket 1 from or to ranks [1]", slow, job, engine)
        print("passed deadline", flush=True)
        expect(ConnectionError, "rank 0 lost one of ranks [1] in bucket ", dead, job, engine)
        print("passed death", flush=True)
    else:
        time.sleep(3)
        interrupted(lambda: time.sleep(3), slow, job, engine)
        interrupted(lambda: os._exit(0), dead, job, engine)
    # The process groups are broken now; leave without their shutdown.
    sys.stdout.flush()
    os._exit(0)


def expect(error, message, way, job, engine):
    try:
        way.to_engine(job.chunks, engine, 1)
    except error as caught:
        assert message in str(caught), caught
    else:
        raise AssertionError(f"no {error.__name__}")


def interrupted(what, way, job, engine):
    """A transfer in which this rank does something else before it sends its second bucket."""
    original = P2PChannel.post

    def post(self, name, *messages):
        if name == "bucket 1":
            what()
        return original(self, name, *messages)

    P2PChannel.post = post
    try:
        with contextlib.suppress(TimeoutError, ConnectionError):
            way.to_engine(job.chunks, engine, 1)
    finally:
        P2PChannel.post = original


def main():
    dist.init_process_group("gloo")
    hostile.install()
    for case in json.loads(sys.argv[1]):
        check_case(SimpleNamespace(**DEFAULTS | case))
    check_lost_ranks(SimpleNamespace(**DEFAULTS | {"pp": 2}))


if __name__ == "__main__":
    main()
