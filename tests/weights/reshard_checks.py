"""What a reshard and a swap move and hold, on the live models of reshard_ranks.py: by the wire, by the meter and by the
plan's figures."""

import torch

from mindspeed_rl_plugin.device import StorageMeter
from mindspeed_rl_plugin.layout.layout import engine_layout, megatron_layout
from mindspeed_rl_plugin.tools.plan.estimate import weights_by_layer
from mindspeed_rl_plugin.tools.plan.flow import FlowCells
from mindspeed_rl_plugin.weights.offload import gathered
from mindspeed_rl_plugin.weights.resharder import Resharder
from mindspeed_rl_plugin.weights.storages import unwrap

BUCKET = 16 << 10


def check_modes(job, engines):
    """Both modes give the same engine bitwise, and move and hold what the plan's figures say."""
    itemsize = engines[0][0].dtype.itemsize
    for stream, engine in engines:
        sources = {r: megatron_layout(job.shape, job.parallel, r) for r in range(job.parallel.world)}
        wanted = {r: engine_layout(job.shape, stream.engine.tp, r % stream.engine.tp) for r in sources}
        cells = FlowCells(sources, wanted, stream.tensors, itemsize=itemsize, node_size=len(sources))
        with gathered(job.chunks):
            streamed = stream.to_engine(job.chunks, engine, 0)
            assert streamed.received == cells.flow().received[stream.rank]
            assert streamed.temporary <= 2 * BUCKET
            other = {name: torch.zeros_like(t) for name, t in engine.items()}
            sizes = dict(rank=stream.rank, engine_dtype=stream.dtype, bucket_bytes=BUCKET)
            way = Resharder(job.shape, job.parallel, stream.engine.tp, mode="allgather", **sizes)
            done = way.to_engine(job.chunks, other, 0)
            for name, tensor in engine.items():
                assert torch.equal(other[name], tensor), name
            assert done.received == cells.flow(everything=True).received[stream.rank]
            whole = weights_by_layer(job.shape, itemsize).sum()
            assert whole <= done.temporary <= 1.02 * whole, (done.temporary, whole)


def training_state(job):
    """One tensor of every storage that the trainer keeps on its device; Adam's counters of steps live on the host."""
    tensors = [t for t in job.optimizer_tensors() if t.numel() > 1]
    for chunk in job.chunks:
        tensors += [t for b in chunk.buffers for t in (b.grad_data, b.param_data) if t is not None]
        tensors += [t for p in unwrap(chunk).parameters() for t in (p.data, p.grad, p.main_grad) if t is not None]
        tensors += unwrap(chunk).buffers()
    return list({t.untyped_storage()._cdata: t for t in tensors}.values())


def check_memory(job, state, resharder, engine):
    """Twenty cycles: memory is back each time, not a byte of training state is on the device in between, and a reshard
    uses at most two buckets besides the weights."""
    resharder.verify = state.verify = False
    with StorageMeter() as meter, gathered(job.chunks):
        meter.track(*engine.values())
        generation = meter.allocated()
        training = training_state(job)
        meter.track(*training)
        base, parameters = meter.allocated(), sum(p.numel() for p in unwrap(job.chunks[0]).parameters())
        # The list leaves out nothing: weights, gradients and two moments, all of them float32 and whole on every rank.
        assert job.dtype == torch.float32 and not job.case.distributed
        assert base - generation == sum(t.untyped_storage().nbytes() for t in training) >= 4 * 4 * parameters
        for version in range(20):
            meter.reset_peak()
            resharder.to_engine(job.chunks, engine, version)
            # Two buckets, and the few numbers that ranks tell each other.
            assert meter.peak() - base <= 2 * BUCKET + 256, meter.peak() - base
            state.offload()
            left = [t.untyped_storage().nbytes() for t in training_state(job)]
            assert len(left) == len(training) and not any(left), left
            assert meter.allocated() == generation, (meter.allocated(), generation)
            state.onload()
            assert meter.allocated() == base
    resharder.verify = True
