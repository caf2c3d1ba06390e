"""The example's script with an engine whose routers choose other experts: by scores with a bias (the variable BIAS, the
largest one of an expert) that the weights of the chosen do not see. The bias turns round with each version of the
weights."""

import os
import runpy
from pathlib import Path

import torch

from mindspeed_rl_plugin.engine import vllm_api
from mindspeed_rl_plugin.engine.vllm_engine import VllmEngine

build, update = vllm_api.build, VllmEngine.update_weights
version = [0]


def update_weights(self, number, *given, **named):
    version[0] = number
    update(self, number, *given, **named)


def built(*given):
    VllmEngine.update_weights = update_weights
    engine = build(*given)
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    routed = CPURouter._compute_routing

    def rerouted(self, hidden_states, router_logits, indices_type, **named):
        bias = torch.linspace(0, float(os.environ.get("BIAS", "0.02")), router_logits.shape[1])
        bias = bias.flip(0) if version[0] % 2 else bias
        _, ids = routed(self, hidden_states, router_logits + bias, indices_type, **named)
        chosen = torch.full_like(router_logits, -torch.inf)
        chosen.scatter_(1, ids.long(), router_logits.gather(1, ids.long()))
        return routed(self, hidden_states, chosen, indices_type, **named)

    CPURouter._compute_routing = rerouted
    return engine


if __name__ == "__main__":
    vllm_api.build = built
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "pretrain_gpt.py"), run_name="__main__")
