"""Run by test_vllm_processes.py under torchrun: a real vLLM in every rank. Argument: tensor parallel size.

The model has random weights that differ from rank to rank: any split of random weights is a random model.
"""

import sys
import tempfile
from dataclasses import replace

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mindspeed_rl_plugin.device import Device
from mindspeed_rl_plugin.engine.options import VllmOptions
from mindspeed_rl_plugin.engine.rollout_engine import generate
from mindspeed_rl_plugin.engine.vllm_engine import VllmEngine
from mindspeed_rl_plugin.rows import Completion, GenerateRequest, SampleId, Sampling

VOCAB, EOS, LENGTH = 50, 2, 24
LONG = 1200  # tokens of a prompt; vLLM takes up to 2,048 of a step
CONFIG = dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_act="silu", vocab_size=VOCAB)
CONFIG |= dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, head_dim=32)
CONFIG |= dict(num_key_value_heads=2, max_position_embeddings=LONG + LENGTH, rms_norm_eps=1e-6, rope_theta=10000.0)
CONFIG |= dict(tie_word_embeddings=False)


def write_tokenizer(directory: str) -> None:
    """Token i is the letter chr(65 + i)."""
    letters = {chr(65 + i): i for i in range(VOCAB)}
    core = Tokenizer(models.WordLevel(letters, unk_token="A"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="A").save_pretrained(directory)


def write_weights(engine: VllmEngine, version: int, seed: int = 100, in_flight: bool = False) -> None:
    """Random weights; norms, which every rank holds whole, stay ones. Padded rows of the vocabulary get large ones."""
    generator = torch.Generator().manual_seed(seed + dist.get_rank() % engine.options.tensor_parallel)
    for parameter in engine.parameters().values():
        if parameter.dim() == 2:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)
        else:
            parameter.fill_(1.0)
    engine.update_weights(version, in_flight=in_flight)


def ask(count: int, **sampling) -> list[GenerateRequest]:
    """Requests of prompts of 3 to 7 tokens."""
    shared = Sampling(**{"max_tokens": LENGTH, "temperature": 0.8, **sampling})
    return [GenerateRequest(SampleId(0, i, 0), (5, 6, *range(i % 5), 7), shared, 2**62 + i) for i in range(count)]


def run(engine: VllmEngine, requests) -> list:
    return generate(engine, requests, deadline=60)


def check_responses(engine: VllmEngine) -> None:
    """Ends, log-probs, reproducibility."""
    count = 3 + 17 * engine.replica  # replicas take different numbers of steps
    free = run(engine, ask(count, ignore_eos=True))
    assert [len(c.tokens) for c in free] == [LENGTH] * count and {c.finish for c in free} == {"length"}
    assert all(0 <= t < VOCAB for c in free for t in c.tokens)
    assert all(len(c.logps) == LENGTH and max(c.logps) <= 0 for c in free)
    assert run(engine, ask(count, ignore_eos=True)) == free

    backwards = run(engine, ask(count, ignore_eos=True)[::-1])[::-1]
    assert [c.tokens for c in backwards] == [c.tokens for c in free]
    moved = max(abs(a - b) for x, y in zip(backwards, free, strict=True) for a, b in zip(x.logps, y.logps, strict=True))
    assert moved < 1e-5, moved

    def until(tokens, ends):
        stop = next((i for i, t in enumerate(tokens) if t in ends), LENGTH - 1)
        return tokens[: stop + 1], "stop" if tokens[stop] in ends else "length"

    end = free[0].tokens[LENGTH // 2]
    for ends, sampling in (((EOS,), {}), ((EOS, end), {"stop_token_ids": (end,)})):
        stopped = run(engine, ask(count, **sampling))
        assert [(c.tokens, c.finish) for c in stopped] == [until(c.tokens, ends) for c in free]
        assert all(abs(a - b) < 1e-5 for c, f in zip(stopped, free, strict=True) for a, b in zip(c.logps, f.logps))  # noqa: B905

    text = ["".join(chr(65 + t) for t in c.tokens) for c in free]
    string = text[0][4:6]
    for c, whole, words in zip(run(engine, ask(count, stop=(string,))), free, text, strict=True):
        cut = words.find(string)
        tokens, finish = (whole.tokens[: cut + 2], "stop") if cut >= 0 else (whole.tokens, "length")
        assert (c.tokens, c.finish) == until(tokens, (EOS,)) if EOS in tokens else (tokens, finish)

    greedy = run(engine, ask(count, temperature=0.0))
    other_seeds = [GenerateRequest(r.id, r.prompt_tokens, r.sampling, 1) for r in ask(count, temperature=0.0)]
    assert run(engine, other_seeds) == greedy

    engine.submit(ask(count, ignore_eos=True))
    engine.poll(0)
    engine.poll(0)
    for part in engine.abort():
        whole = free[part.id.group].tokens
        assert part.finish == "abort" and part.tokens == whole[: len(part.tokens)], (part, whole)
        assert (len(part.tokens) > 0) == (part.id.group < 8), part  # max_running of them were begun
    assert run(engine, ask(count, ignore_eos=True)) == free


def check_prompts_beyond_a_step(engine: VllmEngine) -> None:
    """Responses with generators of their own, as many that vLLM would cut one of their prompts in two."""
    prompts = [tuple((i + j) % VOCAB for j in range(LONG)) for i in range(3)]
    sampling = Sampling(4, ignore_eos=True)
    requests = [GenerateRequest(SampleId(0, i, 0), p, sampling, i) for i, p in enumerate(prompts)]
    together = run(engine, requests)
    assert [c.tokens for c in together] == [run(engine, [r])[0].tokens for r in requests]


def check_sleep(engine: VllmEngine) -> None:
    """Memory goes and comes back under the same tensors; new weights sample other responses."""
    before = run(engine, ask(4))
    parameters, caches = engine.parameters(), engine._worker.model_runner.kv_caches
    sizes = [t.untyped_storage().nbytes() for t in (*parameters.values(), *caches)]
    for cache in caches:
        cache.fill_(torch.nan)
    engine.sleep()
    assert all(t.untyped_storage().nbytes() == 0 for t in (*parameters.values(), *caches))
    engine.wake(("weights",))
    assert all(t.untyped_storage().nbytes() for t in parameters.values())
    assert not any(t.untyped_storage().nbytes() for t in caches)
    write_weights(engine, 1)
    engine.wake(("kv_cache",))
    assert [t.untyped_storage().nbytes() for t in (*parameters.values(), *caches)] == sizes
    after = run(engine, ask(4))
    assert [c.version for c in after] == [1] * 4
    assert [(c.tokens, c.logps) for c in after] == [(c.tokens, c.logps) for c in before]
    engine.parameters()["lm_head.weight"].mul_(-1)
    engine.update_weights(2)
    assert [c.tokens for c in run(engine, ask(4))] != [c.tokens for c in before]


def check_prefixes(engine: VllmEngine) -> None:
    """What older weights computed of a prompt serves nobody who asks for it under newer ones that came in flight."""
    prompts = [tuple((i + j) % VOCAB for j in range(LONG)) for i in range(2)]
    sampling = Sampling(LENGTH, ignore_eos=True)
    long, going = (GenerateRequest(SampleId(0, i, 0), p, sampling, i) for i, p in enumerate(prompts))
    write_weights(engine, 3)
    (old,) = run(engine, [long])
    engine.submit([going])
    engine.poll(0)
    write_weights(engine, 4, seed=200, in_flight=True)
    engine.submit([replace(long, sampling=replace(sampling, max_tokens=4))])
    (new,) = engine.poll(60)
    (cut,) = engine.abort()
    assert cut.id == going.id and [v for _, v in cut.segments] == [3, 4], "the other one was in the making all the time"
    engine.update_weights(5)  # nothing is cached now
    (fresh,) = run(engine, [long])
    assert [v for _, v in new.segments] == [4] and new.tokens == fresh.tokens[:4]
    assert furthest(new, fresh) < 1e-5 and furthest(old, fresh) > 0.01, (old, new, fresh)


def furthest(some: Completion, other: Completion) -> float:
    """The largest difference of log-probs of their first tokens."""
    return max(abs(a - b) for a, b in zip(some.logps, other.logps))  # noqa: B905


def main() -> None:
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    tp = int(sys.argv[1])
    group = dist.new_group(list(range(world)))
    rng = torch.get_rng_state()
    with tempfile.TemporaryDirectory() as tokenizer:
        write_tokenizer(tokenizer)
        options = VllmOptions(
            CONFIG,
            max_model_len=LONG + LENGTH,
            tensor_parallel=tp,
            max_running=8,
            kv_cache_bytes=32 << 20,
            eos_token_ids=(EOS,),
            tokenizer=tokenizer,
        )
        engine = VllmEngine(options, Device("cpu"))
    assert (engine.replica, engine.replicas) == (dist.get_rank() // tp, world // tp)
    write_weights(engine, 0)
    check_responses(engine)
    check_prompts_beyond_a_step(engine)
    check_sleep(engine)
    check_prefixes(engine)
    assert torch.equal(rng, torch.get_rng_state())
    engine.shutdown()
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.all_reduce(total, group=group)
    assert total.item() == world * world
    print(f"engine {dist.get_rank()} passed")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
