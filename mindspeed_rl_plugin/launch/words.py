"""Values of RL flags that no run takes, whatever its other arguments: numbers outside their limits, unknown words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mindspeed_rl_plugin.config import RLConfig, flag_name
from mindspeed_rl_plugin.engine.limits import LOWEST_TEMPERATURE


@dataclass(frozen=True)
class _Range:
    """A number of the config and its limits; `above` excludes the limit itself."""

    group: str
    name: str
    least: float | None = None
    above: float | None = None
    most: float | None = None

    def message(self, config: RLConfig) -> str | None:
        value = getattr(getattr(config, self.group), self.name)
        if value is None:
            return None
        # Written so that NaN fails.
        low = value > self.above if self.above is not None else self.least is None or value >= self.least
        if low and (self.most is None or value <= self.most):
            return None
        limits = [f"above {self.above:g}" if self.above is not None else f"at least {self.least:g}"]
        if self.most is not None:
            limits.append(f"at most {self.most:g}")
        return f"{flag_name(self.name)} is {value}; give a number {' and '.join(limits)}"


_RANGES = (
    _Range("data", "max_prompt_length", least=1),
    _Range("rollout", "rollout_prompts", least=1),
    _Range("rollout", "samples_per_prompt", least=1),
    _Range("rollout", "max_response_length", least=1),
    _Range("rollout", "temperature", least=LOWEST_TEMPERATURE),
    _Range("rollout", "top_p", above=0, most=1),
    _Range("rollout", "top_k", least=0),
    _Range("rollout", "kv_cache_gb", above=0),
    _Range("rollout", "device_memory_utilization", above=0, most=1),
    _Range("rollout", "max_running", least=1),
    _Range("reward", "reward_workers", least=1),
    _Range("algorithm", "dynamic_sampling_rounds", least=1),
    _Range("forward", "logprob_chunk_tokens", least=0),
    _Range("reshard", "reshard_bucket_mb", least=1),
    _Range("dock", "dock_gb", least=0),
    _Range("dock", "dock_rows", least=0),
    _Range("monitor", "eval_every", least=1),
    _Range("monitor", "eval_prompts", least=0),
    _Range("monitor", "eval_pass_k", least=0),
    _Range("monitor", "wait_timeout", above=0),
)


def ranges(args: Any, config: RLConfig) -> Iterator[str]:
    """One message for each number outside its limits."""
    for row in _RANGES:
        message = row.message(config)
        if message is not None:
            yield message


def swap(args: Any, config: RLConfig) -> Iterator[str]:
    """One message for each word of --rl-swap that cannot be."""
    names, known = config.reshard.swap_names, ("params", "grads", "optimizer", "none")
    for name in names:
        if name not in known:
            yield f"--rl-swap {name} is unknown; known: {', '.join(known)}"
    if "none" in names and len(names) > 1:
        yield f"--rl-swap {' '.join(names)}: 'none' stands alone"
    if "optimizer" in names and getattr(args, "virtual_optimizer", None):
        yield "--virtual-optimizer keeps the moments in host memory of its own; give --rl-swap params grads"
    if "none" not in names and getattr(args, "use_nccl_ub", False):
        yield "--use-nccl-ub registers Megatron's buffers for good; drop it, or give --rl-swap none"
