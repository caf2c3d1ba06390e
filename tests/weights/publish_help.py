"""Plain memory in which ranks of one process publish, and what looks like their models."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from mindspeed_rl_plugin.weights.published_memory import view


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
