"""Trainers that publish into plain memory, and engines that pull from it: all ranks in one process."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from mindspeed_rl_plugin.weights.publish import Publisher, TrainerWeights
from mindspeed_rl_plugin.weights.published_memory import view
from mindspeed_rl_plugin.weights.pull import Puller


class Gone(ValueError):
    """The version was overwritten."""


class Memory:
    """Store and source of one rank. reads: bytes that were read; meanwhile: called in each read."""

    def __init__(self, nbytes, versions):
        self.slots = [np.zeros(nbytes, np.uint8) for _ in range(versions)]
        self.held, self.about, self.reads = [-1] * versions, {}, 0
        self.meanwhile = lambda: None

    def begin(self, version):
        self.slot = self.held.index(min(self.held))
        self.held[self.slot] = -1
        return self.slots[self.slot]

    def commit(self, version, about):
        self.held[self.slot], self.about[version] = version, about

    def seek(self, version, seconds, alive=None):
        version = max(self.held) if version is None else version
        self.check(version, seconds)
        return version, self.about[version]

    def read(self, version, spans, into, seconds):
        memory = self.slots[self.held.index(version)]
        for span, there in zip(spans, into, strict=True):
            part = view(memory, span)
            there[...] = part
            self.reads += part.size
        self.meanwhile()

    def check(self, version, seconds):
        if version not in self.held:
            raise Gone(version)


class Alone:
    """Staging of one process."""

    def __init__(self, key, nbytes, fill):
        self.memory, self.fill = np.empty(nbytes, np.uint8), fill

    def get(self, version, seconds):
        about = self.fill(version, seconds, self.memory)
        return self.memory, about, self.memory.nbytes

    def close(self):
        pass


def puller_of(weights, engine, live, sources, rank=0, deadline=60.0, sharing=Alone, machines=1):
    """Of one rank of an engine, whose ranks are on so many machines, the same number on each."""
    each = max(engine.ranks // machines, 1)
    here = range(rank // each * each, (rank // each + 1) * each)
    return Puller(weights, engine, live, sources, rank=rank, ranks=here, deadline=deadline, sharing=sharing)


def chunks_of(params, vpp=1):
    """Something that looks like Megatron's chunks of one rank; a router's bias is a buffer, and not the only one."""
    each = [
        {n.removeprefix(f"chunk{c}."): t for n, t in params.items() if n.startswith(f"chunk{c}.")} for c in range(vpp)
    ]
    return [
        SimpleNamespace(named_parameters=partial(_named, own, False), named_buffers=partial(_named, own, True))
        for own in (each if vpp > 1 else [params])
    ]


def _named(own, buffers):
    named = [(name, t) for name, t in own.items() if name.endswith("router.expert_bias") == buffers]
    return named + ([("rotary_pos_emb.inv_freq", torch.ones(2))] if buffers else [])


def trainer_of(shape, parallel, params, dtype, verify=False, versions=2):
    """The description, and (publisher, its memory, its chunks) of each rank. params: rank -> stored tensors."""
    chunks = {rank: chunks_of(mine, parallel.vpp) for rank, mine in params.items()}
    own = [
        TrainerWeights.of(shape, parallel, r, c, dtype, lambda k: [k] * parallel.world).kinds[0]
        for r, c in chunks.items()
    ]
    weights = TrainerWeights.of(shape, parallel, 0, chunks[0], dtype, lambda kind: own, verify)
    weights = TrainerWeights.parse(weights.text())
    ranks = []
    for rank, mine in chunks.items():
        made = []
        offer = lambda nbytes, count, made=made: made.append(Memory(nbytes, count)) or made[0]  # noqa: E731
        publisher = Publisher(weights, rank, offer, versions, gather=lambda first: [first] * parallel.world)
        ranks.append((publisher, made[0], mine))
    return weights, ranks
