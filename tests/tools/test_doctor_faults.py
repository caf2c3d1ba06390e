"""Faults in engine and trainer, put into the ranks by a sitecustomize.py: `doctor` names each, and nothing else."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import mindspeed_rl_plugin
from mindspeed_rl_plugin.tools.doctor import doctor, engine_checks, small_models, train_checks
from mindspeed_rl_plugin.tools.doctor.nodes import Nodes
from mindspeed_rl_plugin.tools.doctor.program import run_checks
from mindspeed_rl_plugin.tools.doctor.result import Check, Result, explained, guilty, table
from mindspeed_rl_plugin.tools.doctor.small_models import YOURS
from mindspeed_rl_plugin.tools.rehearse.entry_script import Entry

ROOT = Path(mindspeed_rl_plugin.__file__).parents[1]
# The arguments of a launch: Qwen3-30B-A3B, with flags that no small job has without a script.
LAUNCH = """
    --transformer-impl local --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32
    --kv-channels 128 --group-query-attention --num-query-groups 4 --qk-layernorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --normalization RMSNorm --position-embedding-type rope --rotary-base 1000000
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-layer-freq [1]*48 --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall --tensor-model-parallel-size 4 --sequence-parallel
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --recompute-granularity full
    --recompute-method uniform --recompute-num-layers 1 --no-bias-swiglu-fusion --no-bias-dropout-fusion
    --use-distributed-optimizer --overlap-grad-reduce --ckpt-format torch_dist --bf16 --seq-length 4096
    --max-position-embeddings 32768 --micro-batch-size 1 --global-batch-size 256 --train-samples 100000 --lr 1e-6
    --lr-warmup-samples 1000 --tokenizer-type HuggingFaceTokenizer --tokenizer-model /nowhere --load /nowhere
    --finetune --no-load-optim --rl-algorithm dapo --rl-reward /nowhere.py:grade --rl-prompt-data /nowhere.jsonl
    --rl-pack-sequences --rl-max-tokens-per-microbatch 8192 --rl-swap params,optimizer --rl-temperature 0.8
    --rl-top-p 0.9 --rl-schedule async --rl-generators 4
"""
# What each fault begins with; `after(module)` decorates a function that changes a module of the package when imported.
BEGIN = """
import os
if "RANK" in os.environ:
    import functools, time, torch
    from mindspeed_rl_plugin.host.on_import import after_import
    rank = int(os.environ["RANK"])
    def after(name):
        return lambda change: after_import("mindspeed_rl_plugin." + name, change)
    def wrap(owner, name, call):
        real = getattr(owner, name)
        setattr(owner, name, functools.wraps(real)(lambda *a, **k: call(real, *a, **k)))
"""
# fault: (model, code, the check at fault, words of its figure, other checks that fail as well)
ENGINE = {
    "experts transposed after waking": ("experts", """
    @after("engine.vllm_memory")
    def change(m):
        def woken(real, self, tags):
            real(self, tags)
            for name, p in self.model.named_parameters():
                if "weights" in tags and name.endswith("w13_weight"):
                    p.data = torch.empty_like(p.data.transpose(1, 2).contiguous()).transpose(1, 2)
        def made(real, self, worker):
            real(self, worker)
            from mindspeed_rl_plugin.engine import vllm_api
            self.model = vllm_api.model(worker)
        wrap(m.HostMemory, "__init__", made)
        wrap(m.HostMemory, "wake_up", woken)
""", engine_checks.WOKEN, "w13_weight has another shape or stride"),
    "temperature is not in the log-probs": ("dense", """
    @after("engine.vllm_api")
    def change(m):
        def raw(real, worker):
            real(worker)
            sampler = worker.model_runner.sampler
            sampler.logprobs_mode = sampler.topk_topp_sampler.logprobs_mode = "raw_logprobs"
            return True
        wrap(m, "demand_processed_logprobs", raw)
""", engine_checks.SAMPLED, "nats"),
    "a stale prefix cache": ("dense", """
    @after("engine.vllm_engine")
    def change(m):
        wrap(m.VllmEngine, "_forget_prefixes", lambda real, self: None)
        def built(real, arguments):
            engine = real(arguments)
            wrap(engine, "add_request", lambda real, name, prompt, *a: real(name, {**prompt, "cache_salt": "0"}, *a))
            return engine
        wrap(m.vllm_api, "build", built)
""", engine_checks.PREFIX, "nats"),
    "stale tensors of latent attention": ("latent attention", """
    @after("engine.vllm_api")
    def change(m):
        def built(real, arguments):
            engine = real(arguments)
            for holder in m._latent(m.worker(engine)):
                for name in m.DERIVED:
                    stale = torch.nn.Parameter(getattr(holder, name).detach().clone(), requires_grad=False)
                    setattr(holder, name, stale)
            return engine
        wrap(m, "build", built)
        wrap(m, "refresh_derived", lambda real, worker: None)
""", engine_checks.DERIVED_TENSORS, "4 of 4 are stale"),
    "a tied head that is not written": ("dense", """
    @after("engine.vllm_api")
    def change(m):
        def built(real, arguments):
            import copy
            engine = real(arguments)
            model = m.model(m.worker(engine))
            model.lm_head = head = copy.copy(model.lm_head)
            head._parameters = {}
            head.weight = model.model.embed_tokens.weight.detach().clone()
            return engine
        wrap(m, "build", built)
""", engine_checks.NEW_WEIGHTS, "nats"),
    "norms of queries and keys are left out": ("dense", """
    @after("engine.vllm_api")
    def change(m):
        def built(real, arguments):
            engine = real(arguments)
            for layer in m.model(m.worker(engine)).model.layers:
                layer.self_attn.q_norm.forward = layer.self_attn.k_norm.forward = lambda x: x
            return engine
        wrap(m, "build", built)
""", engine_checks.LOADED, "nats"),
    "sleep frees nothing": ("dense", """
    @after("engine.vllm_memory")
    def change(m):
        wrap(m.HostMemory, "sleep", lambda real, self: None)
        wrap(m.HostMemory, "wake_up", lambda real, self, tags: None)
""", engine_checks.SLEEP_FREES, "0 MiB"),
    "a write that does not arrive": ("dense", """
    @after("layout.layout")
    def change(m):
        def shifted(real, self, param, start, size):
            part = real(self, param, start, size)
            return part.clone() if "layers.1.mlp.down" in self.name else part
        wrap(m.Segment, "view", shifted)
""", engine_checks.WRITTEN, "layers.1.mlp.down"),
    "new weights in flight are not recorded": ("dense", """
    @after("engine.vllm_engine")
    def change(m):
        wrap(m.Running, "add", lambda real, self, token, logp, version: real(self, token, logp, 0))
""", engine_checks.IN_FLIGHT, "parts ((0, 0),)"),
    "the engine does not build": ("dense", """
    @after("engine.vllm_api")
    def change(m):
        def fails(real, arguments):
            raise RuntimeError("no kernel image is available")
        wrap(m, "build", fails)
""", engine_checks.BUILD, "no kernel image is available"),
}  # fmt: skip
TRAINER = {
    "a bucket is lost": ("dense", """
    @after("weights.transfer")
    def change(m):
        wrap(m._Buffers, "finish", lambda real, self: (self.batch.wait(), setattr(self, "arrivals", [])))
""", train_checks.ARRIVE, ""),
    "a piece at a wrong offset": ("dense", """
    @after("weights.transfer")
    def change(m):
        wrap(m, "_unpack", lambda real, slot, values: real(slot.roll(1), values))
""", train_checks.ARRIVE, ""),
    "NaN in one shard": ("dense", """
    @after("stages.update")
    def change(m):
        def stepped(real, policy, batches, call, **k):
            out = real(policy, batches, call, **k)
            if rank == 1:
                next(call.args[2][0].parameters()).data[3, 3] = float("nan")
            return out
        wrap(m, "take_step", stepped)
""", train_checks.FINITE, "rank 1"),
    "rope base in the engine's config": ("dense", """
    @after("engine.vllm_engine")
    def change(m):
        wrap(m, "for_engine", lambda real, config: {**real(config), "rope_theta": 100.0})
""", train_checks.WHERE, "attention of layer 0"),
    "weights one publication late": ("dense", """
    @after("weights.resharder")
    def change(m):
        last = {}
        def moved(real, self, chunks, parameters, version):
            transfer = real(self, chunks, parameters, version)
            for name, p in parameters.items():
                new = p.clone()
                p.copy_(last.get(name, new))
                last[name] = new
            return transfer
        wrap(m.Resharder, "to_engine", moved)
""", train_checks.WHERE, "embedding"),
    "weights of the second engine alone": ("dense", """
    @after("weights.resharder")
    def change(m):
        def moved(real, self, chunks, parameters, version):
            transfer = real(self, chunks, parameters, version)
            if rank == 1:
                parameters["model.layers.1.mlp.down_proj.weight"].mul_(-3)
            return transfer
        wrap(m.Resharder, "to_engine", moved)
""", train_checks.WHERE, "MLP of layer 1"),
    "a router bias that is not sent": ("experts", """
    @after("weights.resharder")
    def change(m):
        def moved(real, self, chunks, parameters, version):
            transfer = real(self, chunks, parameters, version)
            [p.zero_() for n, p in parameters.items() if n.endswith("e_score_correction_bias")]
            return transfer
        wrap(m.Resharder, "to_engine", moved)
""", train_checks.WHERE, "MLP of layer 1"),
    "scaling in the engine's config": ("latent attention", """
    @after("engine.vllm_engine")
    def change(m):
        def scaled(real, config):
            config = real(config)
            name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
            return {**config, name: {**config[name], "mscale_all_dim": 0.2}}
        wrap(m, "for_engine", scaled)
""", train_checks.WHERE, "attention of layer 0"),
    "dropout in the trainer": ("dense", """
    @after("stages.update")
    def change(m):
        def stepped(real, policy, batches, call, **k):
            for module in call.args[2][0].modules():
                if hasattr(module, "hidden_dropout"):
                    module.hidden_dropout = 0.2
            return real(policy, batches, call, **k)
        wrap(m, "take_step", stepped)
""", train_checks.RATIO, "1 +- "),
    "memory that is not given back": ("dense", """
    @after("stages.update")
    def change(m):
        held = []
        def stepped(real, *a, **k):
            held.append(torch.ones(200 << 18))
            return real(*a, **k)
        wrap(m, "take_step", stepped)
""", train_checks.GROWTH, "MiB"),
    "a resume that forgets the optimizer": ("dense", """
    @after("loop.run")
    def change(m):
        def loaded(real, self, model, optimizer, start):
            if start.kind == "resume":
                for part in getattr(optimizer, "chained_optimizers", [optimizer]):
                    for state in part.optimizer.state.values():
                        state["exp_avg"].zero_()
            return real(self, model, optimizer, start)
        wrap(m.Run, "on_checkpoint_loaded", loaded)
""", train_checks.RESUME, "resumed"),
    "weights of a token's experts in the engine's config": (YOURS, """
    @after("engine.vllm_engine")
    def change(m):
        wrap(m, "for_engine", lambda real, config: {**real(config), "norm_topk_prob": False})
""", train_checks.WHERE, "MLP of layer 0"),
}  # fmt: skip


def environment(tmp_path: Path, code: str) -> dict[str, str]:
    (tmp_path / "sitecustomize.py").write_text(BEGIN + code)
    path = os.pathsep.join(filter(None, (str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def of_engine(tmp_path: Path, code: str, dtype: str, models: Mapping[str, Any]) -> list[Result]:
    (file := tmp_path / "models.json").write_text(json.dumps(models))
    program, env = (engine_checks.__name__, engine_checks.ENGINE_CHECKS), environment(tmp_path, code)
    return run_checks(*program, Nodes(1), tmp_path / "work", 300.0, env, dtype, str(file), *models)


def bench(tmp_path: Path, code: str, dtype: str, arguments: Sequence[str] = ()) -> train_checks.TrainBench:
    entry = Entry(ROOT / "examples" / "pretrain_gpt.py", [])
    return train_checks.TrainBench(Nodes(2), tmp_path, entry, environment(tmp_path, code), dtype, arguments)


def check_named(results: Iterable[Result], check: Check | None, words: str) -> None:
    results = explained(list(results), doctor.ALL_CHECKS)
    print(table(results))
    named = guilty(results)
    assert [r.check for r in named] == ([check.name] if check else []), named
    assert all(words in r.figure for r in named)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", ENGINE)
def test_faults_of_the_engine(tmp_path, fault):
    model, code, check, words = ENGINE[fault]
    models = small_models.models_of(())[0]
    check_named(of_engine(tmp_path, code, "float32", {model: models[model]}), check, words)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", TRAINER)
def test_faults_of_trainer_and_engine(tmp_path, fault):
    model, code, check, words = TRAINER[fault]
    own = bench(tmp_path, code, *(("bfloat16", LAUNCH.split()) if model == YOURS else ("float32",)))
    axis = (train_checks.LAYOUTS | {YOURS: ("tp",)})[model][0]
    check_named(train_checks.check_model(model, axis, own, own.prepare(), first=True, full=False), check, words)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_healthy_engine_is_not_named_in_bfloat16(tmp_path):
    models, why = small_models.models_of(LAUNCH.split())
    assert list(models) == [*train_checks.LAYOUTS, YOURS] and not why
    assert (models[YOURS]["model_type"], models[YOURS]["num_hidden_layers"]) == ("qwen3_moe", 2)
    check_named(of_engine(tmp_path, "", "bfloat16", models), None, "")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", [*train_checks.LAYOUTS, YOURS])
def test_a_healthy_trainer_is_not_named_in_bfloat16(tmp_path, model):
    own = bench(tmp_path, "", "bfloat16", LAUNCH.split() if model in ("dense", YOURS) else ())
    axis = (train_checks.LAYOUTS | {YOURS: ("tp",)})[model][0]
    results = train_checks.check_model(model, axis, own, own.prepare(), first=True, full=model == YOURS)
    check_named(results, None, "")
