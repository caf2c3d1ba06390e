"""Faults that a sitecustomize.py plants into processes of `doctor`, what it must name for each, and how it starts."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from two_machines import CABLE, PORT, Machine

import mindspeed_rl_plugin
from mindspeed_rl_plugin.tools.doctor import engine_checks, machine, nodes, train_checks
from mindspeed_rl_plugin.tools.doctor.rank_checks import COLLECTIVES, COPIES, POINT_TO_POINT, SPEED
from mindspeed_rl_plugin.tools.doctor.result import Check, Result, guilty, table
from mindspeed_rl_plugin.tools.doctor.small_models import YOURS

ROOT = Path(mindspeed_rl_plugin.__file__).parents[1]
ALL_REDUCE, ALL_GATHER, _, ALL_TO_ALL, BROADCAST = COLLECTIVES
# What each fault begins with. `wrap` replaces a function by one that gets the real one first; `after` calls `change`
# with its result and arguments. owner: an object, or a module of the package, which may not be imported yet.
BEGIN = """
import os
if "RANK" in os.environ:
    import dataclasses, functools, signal, sys, time, torch
    import torch.distributed as dist
    from mindspeed_rl_plugin.host.on_import import after_import
    rank = int(os.environ["RANK"])
    def wrap(owner, path, call):
        if isinstance(owner, str):
            return after_import("mindspeed_rl_plugin." + owner, lambda module: wrap(module, path, call))
        *parents, name = path.split(".")
        owner = functools.reduce(getattr, parents, owner)
        real = getattr(owner, name)
        made = functools.wraps(real)(lambda *a, **k: call(real, *a, **k))
        for one in (owner, dist.distributed_c10d) if owner is dist else (owner,):
            setattr(one, name, made)
    def after(owner, path, change):
        def call(real, *a, **k):
            out = real(*a, **k)
            change(out, *a)
            return out
        wrap(owner, path, call)
    def engine_built(change):  # change(engine, module vllm_api)
        name = "engine.vllm_api"
        after(name, "build", lambda engine, _: change(engine, sys.modules["mindspeed_rl_plugin." + name]))
    def sent(change):  # change(name -> tensor of the engine, version)
        after("weights.resharder", "Resharder.to_engine", lambda transfer, *a: change(*a[2:]))
    def late(real, *a, **k):
        time.sleep(0.1)
        return real(*a, **k)
"""
SLOW_RANK = """
    def slowly(real, *a):
        began = time.perf_counter()
        out = real(*a)
        time.sleep(19 * (time.perf_counter() - began))
        return out
    if rank == 1:
        wrap(torch, "mm", slowly)
        [wrap(dist, name, late) for name in ("isend", "irecv")]
"""
LOST = """
    if rank == 1:
        wrap(dist, "all_to_all_single", lambda *a, **k: os.kill(os.getpid(), signal.SIG{}))
"""
SMALL = "mount -o remount,size=64m /dev/shm"
BRAKE = f"tc qdisc add dev {CABLE} root tbf rate 200mbit burst 64kb latency 400ms"
# Nothing of machine 1 reaches machine 0, but what is for its port of the job.
_rule = "ip rule add to 10.77.0.1 ipproto tcp pref"
CLOSE = f"{_rule} 10 dport {PORT} lookup main; {_rule} 20 blackhole"
# Where -> fault -> (which model, number of ranks, or words of the command; code; (check, where, words of its figure)
# for each that is at fault).
FAULTS = {"engine": {
    "experts transposed after waking": ("experts", """
    after("engine.vllm_memory", "HostMemory.__init__", lambda _, self, worker: setattr(self, "worker", worker))
    def woken(_, self, tags):
        for name, p in sys.modules["mindspeed_rl_plugin.engine.vllm_api"].model(self.worker).named_parameters():
            if "weights" in tags and name.endswith("w13_weight"):
                p.data = torch.empty_like(p.data.transpose(1, 2).contiguous()).transpose(1, 2)
    after("engine.vllm_memory", "HostMemory.wake_up", woken)
""", (engine_checks.WOKEN, "experts", "w13_weight has another shape or stride")),
    "temperature is not in the log-probs": ("dense", """
    def raw(real, worker):
        real(worker)
        sampler = worker.model_runner.sampler
        sampler.logprobs_mode = sampler.topk_topp_sampler.logprobs_mode = "raw_logprobs"
        return True
    wrap("engine.vllm_api", "demand_processed_logprobs", raw)
""", (engine_checks.SAMPLED, "dense", "nats")),
    "a stale prefix cache": ("dense", """
    wrap("engine.vllm_engine", "VllmEngine._forget_prefixes", lambda *_: None)
    @engine_built
    def change(engine, _):
        wrap(engine, "add_request", lambda real, name, prompt, *a: real(name, {**prompt, "cache_salt": "0"}, *a))
""", (engine_checks.PREFIX, "dense", "nats")),
    "stale tensors of latent attention": ("latent attention", """
    @engine_built
    def change(engine, api):
        for holder in api._latent(api.worker(engine)):
            for name in api.DERIVED:
                stale = getattr(holder, name).detach().clone()
                setattr(holder, name, torch.nn.Parameter(stale, requires_grad=False))
    wrap("engine.vllm_api", "refresh_derived", lambda *_: None)
""", (engine_checks.DERIVED_TENSORS, "latent attention", "4 of 4 are stale")),
    "a tied head that is not written": ("dense", """
    @engine_built
    def change(engine, api):
        import copy
        model = api.model(api.worker(engine))
        model.lm_head = head = copy.copy(model.lm_head)
        head._parameters = {}
        head.weight = model.model.embed_tokens.weight.detach().clone()
""", (engine_checks.NEW_WEIGHTS, "dense", "nats")),
    "norms of queries and keys are left out": ("dense", """
    @engine_built
    def change(engine, api):
        for layer in api.model(api.worker(engine)).model.layers:
            layer.self_attn.q_norm.forward = layer.self_attn.k_norm.forward = lambda x: x
""", (engine_checks.LOADED, "dense", "nats")),
    "sleep frees nothing": ("dense", """
    [wrap("engine.vllm_memory", f"HostMemory.{name}", lambda *_: None) for name in ("sleep", "wake_up")]
""", (engine_checks.SLEEP_FREES, "dense", "0 MiB")),
    "a write that does not arrive": ("dense", """
    def shifted(real, self, *a):
        return real(self, *a).clone() if "layers.1.mlp.down" in self.name else real(self, *a)
    wrap("layout.layout", "Segment.view", shifted)
""", (engine_checks.WRITTEN, "dense", "layers.1.mlp.down")),
    "new weights in flight are not recorded": ("dense", """
    wrap("engine.vllm_engine", "Running.add", lambda real, self, token, logp, version: real(self, token, logp, 0))
""", (engine_checks.IN_FLIGHT, "dense", "parts ((0, 0),)")),
    "the engine does not build": ("dense", """
    def fails(real, arguments):
        raise RuntimeError("no kernel image is available")
    wrap("engine.vllm_api", "build", fails)
""", (engine_checks.BUILD, "dense", "no kernel image is available")),
}, "trainer": {
    "a bucket is lost": ("dense", """
    wrap("weights.transfer", "_Buffers.finish", lambda real, self: (self.batch.wait(), setattr(self, "arrivals", [])))
""", (train_checks.ARRIVE, "dense", "")),
    "a piece at a wrong offset": ("dense", """
    wrap("weights.transfer", "_unpack", lambda real, slot, values: real(slot.roll(1), values))
""", (train_checks.ARRIVE, "dense", "")),
    "NaN in one shard": ("dense", """
    def stepped(_, policy, batches, call):
        if rank == 1:
            next(call.args[2][0].parameters()).data[3, 3] = float("nan")
    after("stages.update", "take_step", stepped)
""", (train_checks.FINITE, "dense", "rank 1")),
    "rope base in the engine's config": ("dense", """
    wrap("engine.vllm_engine", "for_engine", lambda real, config: {**real(config), "rope_theta": 100.0})
""", (train_checks.WHERE, "dense", "attention of layer 0")),
    "weights one publication late": ("dense", """
    last = {}
    @sent
    def change(parameters, version):
        for name, p in parameters.items():
            new = p.clone()
            p.copy_(last.get(name, new))
            last[name] = new
""", (train_checks.WHERE, "dense", "embedding")),
    "weights of the second engine alone": ("dense", """
    if rank == 1:
        sent(lambda parameters, version: parameters["model.layers.1.mlp.down_proj.weight"].mul_(-3))
""", (train_checks.WHERE, "dense", "MLP of layer 1")),
    "a router bias that is not sent": ("experts", """
    sent(lambda found, _: [p.zero_() for n, p in found.items() if n.endswith("e_score_correction_bias")])
""", (train_checks.WHERE, "experts", "MLP of layer 1")),
    "scaling in the engine's config": ("latent attention", """
    def scaled(real, config):
        config = real(config)
        name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        return {**config, name: {**config[name], "mscale_all_dim": 0.2}}
    wrap("engine.vllm_engine", "for_engine", scaled)
""", (train_checks.WHERE, "latent attention", "attention of layer 0")),
    "dropout in the trainer": ("dense", """
    def stepped(real, policy, batches, call, **k):
        for module in call.args[2][0].modules():
            if hasattr(module, "hidden_dropout"):
                module.hidden_dropout = 0.2
        return real(policy, batches, call, **k)
    wrap("stages.update", "take_step", stepped)
""", (train_checks.RATIO, "dense", "1 +- ")),
    "memory that is not given back": ("dense", """
    held = []
    after("stages.update", "take_step", lambda *_: held.append(torch.ones(200 << 18)))
""", (train_checks.GROWTH, "dense", "MiB")),
    "a resume that forgets the optimizer": ("dense", """
    def loaded(real, self, model, optimizer, start):
        if start.kind == "resume":
            for part in getattr(optimizer, "chained_optimizers", [optimizer]):
                for state in part.optimizer.state.values():
                    state["exp_avg"].zero_()
        return real(self, model, optimizer, start)
    wrap("loop.run", "Run.on_checkpoint_loaded", loaded)
""", (train_checks.RESUME, "dense", "resumed")),
    "weights of a token's experts in the engine's config": (YOURS, """
    wrap("engine.vllm_engine", "for_engine", lambda real, config: {**real(config), "norm_topk_prob": False})
""", (train_checks.WHERE, YOURS, "MLP of layer 0")),
    "branches of a tree aligned at the top left": (YOURS, """
    def top_left(real, *a, attn_mask=None, **k):
        return real(*a, attn_mask=attn_mask if attn_mask is None else torch.ones_like(attn_mask).tril(), **k)
    wrap(torch.nn.functional, "scaled_dot_product_attention", top_left)
""", (train_checks.WHERE, YOURS, "attention of layer 0")),
}, "ranks": {
    "a wait that returns at once": (2, """
    wrap("device.device", "ThreadCopier.start", lambda real, *a: dataclasses.replace(real(*a), wait=lambda: None))
""", (COPIES[2], "", "ranks 0, 1: 16 of 16 wrong")),
    "a synchronize that returns at once": (2, """
    idle = {"synchronize": lambda: None}
    wrap("device.device", "ThreadCopier.start", lambda real, *a: dataclasses.replace(real(*a), **idle))
""", (COPIES[3], "", " of 16 wrong")),
    "a slow rank": (4, SLOW_RANK, (SPEED, "", "rank 1: ")),
    "a slow rank of two": (2, SLOW_RANK, (SPEED, "", "rank 1: ")),
    "a rank with slow messages": (4, """
    if rank == 1:
        [wrap(dist, name, late) for name in ("isend", "irecv")]
""", (POINT_TO_POINT, "rank 1", "all its links are slow")),
    "a slow link": (4, """
    def send(real, tensor, *a, **k):
        time.sleep(0.15 * (tensor.nbytes > 1000 and 2 in (*a, *k.values())))
        return real(tensor, *a, **k)
    if rank == 1:
        wrap(dist, "isend", send)
""", (POINT_TO_POINT, "1->2", " ms")),
    "a rank hangs": (4, """
    if rank == 1:
        wrap(dist, "all_reduce", lambda *a, **k: time.sleep(1000))
""", (ALL_REDUCE, "", "rank 1: hung for ")),
    "a rank raises an error": (2, """
    if rank == 1:
        wrap(dist, "all_to_all_single", lambda *a, **k: torch.zeros(2) @ torch.zeros(3))
""", (ALL_TO_ALL, "", "rank 1 lost one of ranks [0]")),
    "a wrong value": (2, """
    def wrong(real, out, *a, **k):
        work = real(out, *a, **k)
        work.wait()
        out[-1] += 1
        return work
    if rank == 1:
        wrap(dist, "broadcast", wrong)
""", (BROADCAST, "", "rank 1: ")),
}, "command": {
    "each larger copy loses its last element": ("memory engine trainer", """
    def lossy(real, to, *a, **k):
        if type(to) not in (torch.Tensor, torch.nn.Parameter) or to.numel() <= 4000 or not to.is_contiguous():
            return real(to, *a, **k)
        last = to.data.view(-1)[-1:].clone()
        real(to, *a, **k)
        real(to.data.view(-1)[-1:], last)
        return to
    wrap(torch.Tensor, "copy_", lossy)
""", (COPIES[0], "", "")),
    "SIGKILL": ("links", LOST.format("KILL"), (ALL_TO_ALL, "", "rank 1: died after ")),
    "SIGSTOP": ("links", LOST.format("STOP"), (ALL_TO_ALL, "", "rank 1: hung for ")),
}, "machines": {  # code and, before it, a shell command for machine 1
    "healthy": (2, "", ""),
    "a clock an hour ahead": (2, """
    wrap(time, "time", lambda real: real() + 3600.5)
""", "", (machine.CLOCK, "machine 1", "3600.")),
    "closed ports": (2, "", CLOSE, (machine.PORTS, "machine 0", "[1]"), (machine.PORTS, "machine 1", "[0]")),
    "a small /dev/shm": (2, "", SMALL, (machine.SHM_CHECK, "machine 1", "0.06 GiB")),
    "a slow direction of a cable": (1, "", BRAKE, (POINT_TO_POINT, "1->0", " ms")),
    "a dead rank": (2, """
    if rank == 2:
        wrap(dist, "all_gather_into_tensor", lambda *a, **k: os._exit(7))
""", "", (ALL_GATHER, "", "rank 2: died after ")),
    "a machine that is gone": (2, "", "", (nodes.ANSWERS, "", "[1]")),
}}  # fmt: skip


def planted(folder: Path, code: str) -> dict[str, str]:
    """Environment of processes that begin with this fault, which is written to the folder."""
    (folder / "sitecustomize.py").write_text(BEGIN + code)
    path = os.pathsep.join(filter(None, (str(folder), str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def check_named(results: Iterable[Result], *expected: tuple[Check, str, str]) -> None:
    """At fault are these, (check, where, words of its figure) each, and nothing else."""
    print(table(results := list(results)))
    named = guilty(results)
    assert [(r.check, r.where) for r in named] == [(check.name, where) for check, where, _ in expected], named
    assert all(words in r.told for r, (*_, words) in zip(named, expected, strict=True)), named


def results_of(page: Path) -> list[Result]:
    """The results in a file of --out."""
    rows = json.loads(page.read_text().partition('id="doctor">')[2].partition("</script>")[0])["results"]
    return [*map(Result.of, rows)]


def start_doctor(
    machines: Sequence[Machine], folder: Path, *words: str, ranks: int = 1, code: str = "", shell: str = ""
) -> list[subprocess.Popen]:
    """An agent of torchrun on each machine, with the output in folder/log0 and log1, results in folder/doctor.html.
    code, shell: fault of machine 1, and its command of the shell before that."""
    agents = []
    for index, one in enumerate(machines):
        (own := folder / one.name).mkdir()
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--nnodes=2"]
        torchrun += [f"--node-rank={index}", f"--master-addr={machines[0].address}", f"--master-port={PORT}"]
        doctor = ["-m", "mindspeed_rl_plugin", "doctor", *words, "--out", str(folder / "doctor.html")]
        env = planted(own, code * index) | {"TMPDIR": str(own), "GLOO_SOCKET_IFNAME": CABLE}
        call = one.command(["sh", "-ec", f'{shell * index}\nexec "$@"', "sh", *torchrun, *doctor])
        with open(folder / f"log{index}", "w") as log:
            agents.append(subprocess.Popen(call, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=ROOT))
    return agents
