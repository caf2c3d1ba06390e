"""What RL reads in addition to the checkpoint (tokenizer, data, graders, stages), checked before a model is built."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_rl_plugin.algorithms import resolve
from mindspeed_rl_plugin.config import RLConfig, given_flags
from mindspeed_rl_plugin.config.run_flags import Traced
from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.engine import hf_config
from mindspeed_rl_plugin.engine.response_kind import ONE_TURN
from mindspeed_rl_plugin.environment import replayed, say
from mindspeed_rl_plugin.episodes.episode_kind import response_kind
from mindspeed_rl_plugin.forward import ForwardSettings
from mindspeed_rl_plugin.forward.settings import length_multiple
from mindspeed_rl_plugin.generators.external_engines import check_servers
from mindspeed_rl_plugin.host.engine_env import demand_routes, prepare_engine_env
from mindspeed_rl_plugin.loop.arithmetic import arithmetic_of, tokens_of_group
from mindspeed_rl_plugin.loop.engine_options import dtype_of
from mindspeed_rl_plugin.loop.inputs import Inputs
from mindspeed_rl_plugin.prompts import PairRenderer, PairStream, PromptStream, Renderer
from mindspeed_rl_plugin.prompts.ends import marked, response_ends
from mindspeed_rl_plugin.prompts.render import is_rendered
from mindspeed_rl_plugin.prompts.tokenizer import load_tokenizer, model_vocabulary, tokenizer_path
from mindspeed_rl_plugin.ranks import gather_all, on_all_ranks, rank_of_job
from mindspeed_rl_plugin.reward import RewardPool
from mindspeed_rl_plugin.stages.prompts import meta_of
from mindspeed_rl_plugin.stages.stage import StageSpec
from mindspeed_rl_plugin.stages.user import load_stages, try_once

SAMPLED_PROMPTS = 64  # prompts of the data, evenly spaced, whose mean length is printed with --rl-share-prompts


def read_inputs(args: argparse.Namespace) -> Inputs:
    """Raises ValueError, on every rank, for an input that is missing or does not fit."""
    config = RLConfig.from_args(args)
    algorithm, hf_model = resolve(config.algorithm), config.rollout.hf_model
    if not algorithm.from_pairs:
        prepare_engine_env(get_device().kind, sleep_mode=True)
        here = config.schedule.generator_ranks or not config.schedule.apart
        if here and config.forward.router_replay == "rollout":
            demand_routes(get_device().kind)
    path = tokenizer_path(args)
    tokenizer = load_tokenizer(path, config.data.trust_remote_code)
    reference = hf_config.load_reference(hf_model) if hf_model else None
    vocab = model_vocabulary(args, tokenizer, reference, config.data.smaller_tokenizer)
    forward = ForwardSettings.from_args(
        args,
        vocab_size=vocab,
        temperature=config.rollout.temperature,
        chunk_tokens=config.forward.logprob_chunk_tokens,
        max_tokens=config.forward.max_tokens_per_microbatch,
        packed=config.forward.packed_by is not None,
        shared=config.forward.share_prompts,
    )
    run = os.path.abspath(config.monitor.directory(args.save))
    responses = ONE_TURN if algorithm.from_pairs else response_kind(config, path, tokenizer, run, length_multiple(args))
    stream = functools.partial(_stream, tokenizer, config, algorithm.from_pairs, responses.tools)
    data = stream(config.data.prompt_data, args.seed if config.data.data_seed is None else config.data.data_seed)
    held_out = stream(config.monitor.eval_data, 0) if config.monitor.eval_data else None
    ends = _ends(config, tokenizer, vocab, responses.tools, *filter(None, (data, held_out)))
    inputs = Inputs(
        args=args,
        config=config,
        algorithm=algorithm,
        sizes=arithmetic_of(args),
        tokenizer=tokenizer,
        tokenizer_path=path,
        vocab=vocab,
        flags=given_flags(config),
        forward=forward,
        data=data,
        held_out=held_out,
        responses=responses,
    )
    inputs = inputs if algorithm.from_pairs else _to_sample(inputs, ends)
    if forward.shared:
        _announce_sharing(inputs)
    if config.monitor.trace:
        _check_trace(Traced.parse(config.monitor.trace), inputs)
    return inputs


def _announce_sharing(inputs: Inputs) -> None:
    """Print how many tokens --rl-share-prompts will compute: for pairs of the data, or for prompts of the data with
    responses of two lengths."""
    places = range(0, len(inputs.data), -(-len(inputs.data) // SAMPLED_PROMPTS))
    rows, members, most = [inputs.data.at(i) for i in places], inputs.sizes.members, inputs.forward.max_tokens
    limit, pairs = inputs.config.rollout.max_response_length, inputs.algorithm.from_pairs
    prompt = round(statistics.fmean(len(row.prompt if pairs else row.tokens) for row in rows))
    lengths = [round(statistics.fmean((len(row.chosen) + len(row.rejected)) / 2 for row in rows))] if pairs else None
    said = []
    for response in lengths or (limit, -(-limit // 4)):
        every, computed = tokens_of_group(prompt, response, members, most)
        part = "" if pairs else " (the limit)" if response == limit else " (a quarter of it)"
        said.append(f"{computed} instead of {every} tokens a pass with responses of {response}{part}")
    say(
        f"--rl-share-prompts: prompts have {prompt} tokens (mean of {len(rows)}), so {members} rows compute "
        f"{', '.join(said)}; the metric tokens/shared counts what a run saves"
    )


def _check_trace(traced: Traced, inputs: Inputs) -> None:
    stages = [*(spec.name for spec in inputs.table()), "update", "evaluate"]
    if unknown := [name for name in traced.stages if name not in stages]:
        raise ValueError(f"--rl-trace names stage {unknown[0]}, which this run lacks; its stages: {', '.join(stages)}")
    if traced.last > inputs.args.train_iters:
        raise ValueError(f"--rl-trace ends with iteration {traced.last}, --train-iters is {inputs.args.train_iters}")


def _to_sample(inputs: Inputs, ends: Mapping[int, str]) -> Inputs:
    """The inputs with what an algorithm needs to sample and grade responses. ends: the result of `response_ends`."""
    config, held_out, end_tokens = inputs.config, inputs.held_out, tuple(ends)
    named = (f"{inputs.tokenizer.decode([end])!r} ({end}, {source})" for end, source in ends.items())
    say(f"a response ends at {', '.join(named) or 'the limit of its length only: no token that ends it is known'}")
    engine_config = hf_config.derive_config(inputs.args, vocab_size=inputs.vocab, eos_token_ids=end_tokens)
    if config.rollout.hf_model:
        hf_config.check_against(engine_config, config.rollout.hf_model)
    if config.schedule.engine_url and not replayed():
        dtype = str(dtype_of(inputs.args, config.rollout.engine_dtype)).removeprefix("torch.")
        for problem in check_servers(config, engine_config, dtype):
            raise ValueError(problem)
    graders = _graders(inputs)
    if replayed():  # the dumps have the responses
        inputs.responses.close()
    else:
        inputs.responses.try_once(meta_of(inputs.data.at(0)), inputs.response_seed, inputs.data.where(0))
    inputs = dataclasses.replace(
        inputs,
        held_out=tuple(held_out.all()[: config.monitor.eval_prompts or None]) if held_out else (),
        engine_config=engine_config,
        end_tokens=end_tokens,
        graders=graders,
        own_stages=_own_stages(inputs, len(graders.names), end_tokens),
    )
    inputs.dock_size().check_early()
    return inputs


def _graders(inputs: Inputs) -> RewardPool:
    """The graders: checked against fields and answers of the data, and tried on a row (`RewardPool.try_once`)."""
    reward = inputs.config.reward
    graders = RewardPool(
        inputs.config.graders,
        regex=reward.reward_regex,
        timeout=reward.reward_timeout,
        wait_timeout=inputs.config.monitor.wait_timeout,
        workers=reward.reward_workers,
        on_error=reward.reward_on_error,
        device="cpu" if reward.reward_model_device == "host" else str(get_device().current()),
        trust_remote_code=inputs.config.data.trust_remote_code,
    )
    if replayed():  # the dumps have the grades
        return graders
    inputs, prompts = dataclasses.replace(inputs, graders=graders), inputs.data
    for rows in filter(None, (prompts, inputs.held_out)):
        inputs.check_fields(rows.kinds_of_rows())
        share = dict(itertools.islice(rows.answers().items(), rank_of_job(), None, len(gather_all(None))))
        on_all_ranks(functools.partial(inputs.check_answers, share))
    members = inputs.config.rollout.samples_per_prompt
    row = prompts.at(0)
    for failure in graders.try_once(row, prompts.where(0), members, inputs.responses.grade_fields(row)):
        say(f"warning: {failure}")
    return graders


def _own_stages(inputs: Inputs, graders: int, end_tokens: Sequence[int]) -> tuple[tuple[StageSpec, Any], ...]:
    """A user's stages. First, other instances of these stages are tried on the first row of the data; the row's answer
    is used as the response of every sample."""
    rollout, words, row = inputs.config.rollout, inputs.config.reward.stage, inputs.data.at(0)
    response = [*inputs.tokenizer.encode(row.answer, add_special_tokens=False), *end_tokens[:1]] or [0]
    response, where = response[: rollout.max_response_length], inputs.data.where(0)
    members, kind = rollout.samples_per_prompt, inputs.responses
    try_once(load_stages(words, graders, kind), row, response, members, graders, where, kind)
    return tuple(load_stages(words, graders, kind))


def _stream(
    tokenizer: Any, config: RLConfig, pairs: bool, tools: Sequence[Any] | None, paths: Sequence[str], seed: int
) -> PromptStream | PairStream:
    """The prompts or the pairs of some files. Prints how many were dropped."""
    data, limit, response = config.data, config.data.max_prompt_length, config.rollout.max_response_length
    if pairs:
        keys = {"chosen": data.chosen_key, "rejected": data.rejected_key}
        renderer = PairRenderer(tokenizer, data.prompt_key, keys, data.apply_chat_template)
        stream = PairStream(paths, renderer, max_length=limit, max_response=response, seed=seed)
        what, why = "pairs", "too long (--rl-max-prompt-length, --rl-max-response-length) or with equal answers"
    else:
        renderer = Renderer(tokenizer, data.prompt_key, data.answer_key, data.apply_chat_template, tools)
        stream = PromptStream(paths, renderer, max_length=limit, seed=seed)
        what, why = "prompts", f"longer than {limit} tokens (--rl-max-prompt-length)"
    say(f"{len(stream)} {what} from {' '.join(paths)}; dropped {stream.dropped} {why}")
    return stream


def _ends(
    config: RLConfig, tokenizer: Any, vocab: int, tools: Sequence[Any] | None, *data: PromptStream | PairStream
) -> dict[int, str]:
    """`response_ends` for the prompts of data[0]. Prints the decoded tokens of the first row of each of `data`, with
    the marks of `marked`."""
    pairs, first, model = isinstance(data[0], PairStream), data[0].at(0), config.rollout.hf_model
    chat = config.data.apply_chat_template or is_rendered(
        tokenizer, tokenizer.decode(first.prompt) if pairs else first.text
    )
    ends = response_ends(tokenizer, chat, None if pairs else model, vocab, tools)
    show = functools.partial(marked, tokenizer, {*ends, *config.rollout.stop_token_ids})
    for rows in data:
        row = rows.at(0)
        answers = {"chosen": row.chosen, "rejected": row.rejected} if pairs else {}
        line = f"prompt {show(row.prompt)}" if pairs else f"prompt {show(row.tokens)} *response begins*"
        for name, answer in answers.items():
            line += f", {name} *loss begins* {show((*row.prompt, *answer), len(row.prompt))} *loss ends*"
        say(f"the first, {rows.where(0)}: {line}")
    return ends
