"""What RL reads besides the checkpoint, checked before any model is built: tokenizer, data, graders, stages."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from mindspeed_rl_plugin.algorithms import resolve
from mindspeed_rl_plugin.config import RLConfig, given_flags
from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.engine import hf_config
from mindspeed_rl_plugin.engine.vllm_engine import prepare_environment
from mindspeed_rl_plugin.environment import launch_env
from mindspeed_rl_plugin.forward import ForwardSettings
from mindspeed_rl_plugin.loop.arithmetic import arithmetic_of
from mindspeed_rl_plugin.loop.build import dock_size, table_of
from mindspeed_rl_plugin.loop.inputs import Inputs
from mindspeed_rl_plugin.prompts import PairStream, PromptStream, check_vocabulary, load_tokenizer, tokenizer_path
from mindspeed_rl_plugin.reward import RewardPool
from mindspeed_rl_plugin.stages.user import load_stages


def read_inputs(args: argparse.Namespace) -> Inputs:
    """Raises ValueError for whatever is missing or does not fit, on every rank alike."""
    config = RLConfig.from_args(args)
    algorithm = resolve(config.algorithm)
    if not algorithm.from_pairs:
        prepare_environment(get_device().kind)
    path = tokenizer_path(args)
    tokenizer = load_tokenizer(path)
    check_vocabulary(args, len(tokenizer))
    hf_model = config.rollout.hf_model
    reference = hf_config.load_reference(hf_model) if hf_model else None
    vocab = hf_config.model_vocab_size(len(tokenizer), args.padded_vocab_size, reference)
    common = {
        "args": args,
        "config": config,
        "algorithm": algorithm,
        "sizes": arithmetic_of(args),
        "tokenizer": tokenizer,
        "tokenizer_path": path,
        "vocab": vocab,
        "flags": given_flags(config),
    }
    read = _read_pairs if algorithm.from_pairs else _read_prompts
    return read(args, config, common)


def _read_prompts(args: argparse.Namespace, config: RLConfig, common: dict[str, Any]) -> Inputs:
    data, reward, rollout, vocab = config.data, config.reward, config.rollout, common["vocab"]
    forward = ForwardSettings.from_args(
        args,
        vocab_size=vocab,
        temperature=rollout.temperature,
        chunk_tokens=config.forward.logprob_chunk_tokens,
        max_tokens=config.forward.max_tokens_per_microbatch,
        packed=config.forward.pack_sequences,
    )
    eos = end_tokens(common["tokenizer"])
    engine_config = hf_config.derive_config(args, vocab_size=vocab, eos_token_ids=eos)
    if rollout.hf_model:
        hf_config.check_against(engine_config, rollout.hf_model)

    def stream(paths: Sequence[str], seed: int) -> PromptStream:
        prompts = PromptStream(
            paths,
            common["tokenizer"],
            prompt_key=data.prompt_key,
            answer_key=data.answer_key,
            chat_template=data.apply_chat_template,
            max_length=data.max_prompt_length,
            seed=seed,
        )
        limit = f"longer than {data.max_prompt_length} tokens (--rl-max-prompt-length)"
        _say(f"{len(prompts)} prompts from {' '.join(paths)}; dropped {prompts.dropped} {limit}")
        return prompts

    prompts = stream(data.prompt_data, _data_seed(args, config))
    held_out = stream(config.monitor.eval_data, 0) if config.monitor.eval_data else None
    graders = RewardPool(
        reward.reward,
        regex=reward.reward_regex,
        timeout=reward.reward_timeout,
        wait_timeout=config.monitor.wait_timeout,
        workers=reward.reward_workers,
        on_error=reward.reward_on_error,
        device="cpu" if reward.reward_model_device == "host" else str(get_device().current()),
    )
    for rows in filter(None, (prompts, held_out)):
        graders.check_fields(rows.kinds_of_rows())
    for failure in graders.try_once(prompts.at(0), prompts.where(0), rollout.samples_per_prompt):
        _say(f"warning: {failure}")
    stages = load_stages(reward.stage, len(graders.names))
    inputs = Inputs(
        **common,
        forward=forward,
        data=prompts,
        held_out=tuple(held_out.all()[: config.monitor.eval_prompts or None]) if held_out else (),
        engine_config=engine_config,
        end_tokens=eos,
        graders=graders,
        own_stages=tuple(stages),
    )
    dock_size(inputs, table_of(inputs)).check_early()
    return inputs


def _read_pairs(args: argparse.Namespace, config: RLConfig, common: dict[str, Any]) -> Inputs:
    data = config.data
    forward = ForwardSettings.from_args(
        args,
        vocab_size=common["vocab"],
        temperature=config.rollout.temperature,
        chunk_tokens=config.forward.logprob_chunk_tokens,
    )

    def stream(paths: Sequence[str], seed: int) -> PairStream:
        pairs = PairStream(
            paths,
            common["tokenizer"],
            prompt_key=data.prompt_key,
            chosen_key=data.chosen_key,
            rejected_key=data.rejected_key,
            chat_template=data.apply_chat_template,
            max_length=data.max_prompt_length,
            max_response=config.rollout.max_response_length,
            seed=seed,
        )
        why = "too long (--rl-max-prompt-length, --rl-max-response-length) or with equal answers"
        _say(f"{len(pairs)} pairs from {' '.join(paths)}; left out {pairs.dropped} {why}")
        return pairs

    pairs = stream(data.prompt_data, _data_seed(args, config))
    held_out = stream(config.monitor.eval_data, 0) if config.monitor.eval_data else None
    return Inputs(**common, forward=forward, data=pairs, held_out=held_out)


def end_tokens(tokenizer: Any) -> tuple[int, ...]:
    """Token ids that end a response."""
    return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)


def _data_seed(args: argparse.Namespace, config: RLConfig) -> int:
    return args.seed if config.data.data_seed is None else config.data.data_seed


def _say(line: str) -> None:
    if launch_env()["rank"] == 0:
        print(f"[rl] {line}", flush=True)
