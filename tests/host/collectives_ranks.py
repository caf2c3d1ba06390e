"""Two ranks on gloo behind code that asks for nccl. Asserts by itself; run by test_host_distributed.py."""

from types import SimpleNamespace

import torch

from mindspeed_rl_plugin import host

host.activate_if_needed()
import torch.distributed as dist  # noqa: E402

from mindspeed_rl_plugin.host.vllm_live import all_gatherv, reduce_scatterv  # noqa: E402

dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
rank = dist.get_rank()
assert dist.get_backend() == "gloo"
group = dist.new_group([0, 1], backend="nccl", pg_options=object())
assert dist.get_backend(group) == "gloo"

mine = torch.tensor([1.0, 2.0, 3.0, 4.0]) * (rank + 1)
average = torch.tensor([1.5, 3.0, 4.5, 6.0])
for asynchronous in (False, True):
    value = mine.clone()
    work = dist.all_reduce(value, op=dist.ReduceOp.AVG, group=group, async_op=asynchronous)
    if work is not None:
        work.wait()
    assert torch.equal(value, average), value

    shard, source = torch.empty(2), mine.clone()
    work = dist.reduce_scatter_tensor(shard, source, op=dist.ReduceOp.AVG, group=group, async_op=asynchronous)
    if work is not None:
        work.wait()
    assert torch.equal(shard, average[2 * rank : 2 * rank + 2]), shard
    assert torch.equal(source, mine), "the input is not ours to change"

# Split sizes as Megatron gives them where it believes that they lie on a GPU.
sizes = torch.tensor([1, 3]) if rank == 0 else torch.tensor([2, 2])
received = torch.tensor([1, 2]) if rank == 0 else torch.tensor([3, 2])
out = torch.empty(int(received.sum()))
dist.all_to_all_single(out, mine, output_split_sizes=received, input_split_sizes=sizes, group=group)
expected = [1.0, 2.0, 4.0] if rank == 0 else [2.0, 3.0, 4.0, 6.0, 8.0]
assert out.tolist() == expected, out

# What is exchanged may be freed before the work has been waited for.
for size in (10, 1 << 20):
    freed, arrived = torch.full((size,), float(rank)), torch.empty(size)
    work = dist.all_to_all_single(arrived, freed, group=group, async_op=True)
    freed.fill_(-1.0)
    freed.untyped_storage().resize_(0)
    work.wait()
    assert arrived.sum() == size // 2, arrived

# Tensors of different lengths.
lengths, own = [3, 1], torch.arange(6.0).view(3, 2)[: 3 - 2 * rank] + 10 * rank
gathered = [torch.empty(n, 2) for n in lengths]
dist.all_gather(gathered, own, group=group)
assert gathered[0].tolist() == [[0, 1], [2, 3], [4, 5]] and gathered[1].tolist() == [[10, 11]]
parts = [torch.full((n, 2), float(rank + 1 + i)) for i, n in enumerate(lengths)]
shard = torch.empty(lengths[rank], 2)
dist.reduce_scatter(shard, parts, group=group)
assert torch.equal(shard, torch.full((lengths[rank], 2), 3.0 + 2 * rank)), shard
assert [float(p[0, 0]) for p in parts] == [rank + 1.0, rank + 2.0], "the inputs are not ours to change"

# The same as vLLM asks for it, from experts that engines share.
communicator = SimpleNamespace(device_group=group, world_size=2, rank_in_group=rank)
whole, ids = all_gatherv(communicator, [own, own[:, 0].long()], sizes=lengths)
assert torch.equal(whole, torch.cat(gathered)) and ids.tolist() == [0, 2, 4, 10]
assert torch.equal(all_gatherv(communicator, own[:1]), torch.cat([gathered[0][:1], gathered[1]]))
assert torch.equal(reduce_scatterv(communicator, whole, 0, lengths), 2 * own)
assert torch.equal(reduce_scatterv(communicator, whole, 0), 2 * whole.chunk(2)[rank])

# A tensor that is freed or overwritten while it is sent arrives as it was.
for size in (10, 1 << 20):
    if rank == 0:
        tensor = torch.full((size,), 7.0)
        work = dist.isend(tensor, dst=1, group=group)
        tensor.fill_(-1.0)
        tensor.data = torch.empty(1)
        dist.barrier(group)
        work.wait()
    else:
        dist.barrier(group)
        arrived = torch.empty(size)
        dist.irecv(arrived, src=0, group=group).wait()
        assert torch.equal(arrived, torch.full((size,), 7.0)), arrived

ops = [dist.P2POp(dist.isend, mine, 1 - rank, group), dist.P2POp(dist.irecv, out.new_empty(4), 1 - rank, group)]
for work in dist.batch_isend_irecv(ops):
    work.wait()
assert torch.equal(ops[1].tensor, torch.tensor([1.0, 2.0, 3.0, 4.0]) * (2 - rank))
dist.destroy_process_group()
