"""`rehearse`: an Ascend launch script captured, shrunk, and trained for one RL iteration on this machine.

The checkouts come from MEGATRON_LM_PATH (several, colon separated), MINDSPEED_PATH and MINDSPEED_LLM_PATH.
"""

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from flag_table import SUPPORTED
from test_capture import written

from mindspeed_rl_plugin.checkpoints import conversion
from mindspeed_rl_plugin.checkpoints.start_decision import decide
from mindspeed_rl_plugin.engine.engine_sizes import CPU_LATENT_SIZE
from mindspeed_rl_plugin.tools.rehearse import absent_modules, outcome
from mindspeed_rl_plugin.tools.rehearse.capture import CapturedLaunch, Done
from mindspeed_rl_plugin.tools.rehearse.command_line import Flags
from mindspeed_rl_plugin.tools.rehearse.entry_script import Entry, find_entry, pretraining
from mindspeed_rl_plugin.tools.rehearse.outcome import tail
from mindspeed_rl_plugin.tools.rehearse.shrink import ranks_of_split, remove_unavailable, replace_mindspeed_llm, shrink
from mindspeed_rl_plugin.tools.rehearse.substitutes import substitute

ROOT = Path(__file__).resolve().parents[2]
DENSE, EXPERTS = (ROOT / "examples" / "ascend" / f"{name}.sh" for name in ("grpo_qwen2.5_7b", "grpo_qwen3_30b_a3b"))
CHECKOUTS = ("MEGATRON_LM_PATH", "MINDSPEED_PATH", "MINDSPEED_LLM_PATH")


SCRIPT, PLAIN = "pretrain_gpt.py", "import megatron\n"
# What may be on a machine -> the variable that names it (the script's folder without one), its files.
MACHINE = {
    "llm": ("MINDSPEED_LLM_PATH", {SCRIPT: "import mindspeed_llm\n", "mindspeed_llm/__init__.py": ""}),
    "mindspeed": ("MINDSPEED_PATH", {"mindspeed/__init__.py": ""}),
    "core": ("MEGATRON_LM_PATH", {SCRIPT: PLAIN, "megatron/core/package_info.py": "MAJOR = 0\nMINOR = 12\n"}),
    "own": ("", {SCRIPT: PLAIN}),
}


@pytest.mark.parametrize(
    "there, script, platform, note",
    [
        ("llm mindspeed core", "llm", "MindSpeed-LLM", "pretrain_gpt.py is not here: taken from"),
        ("mindspeed core", "", "MindSpeed", "pretrain_gpt.py is not here: rehearsed with MindSpeed"),
        ("core", "core", "plain Megatron", "pretrain_gpt.py is not here: rehearsed on plain Megatron instead"),
        ("llm core", "core", "plain Megatron", "MindSpeed is not installed"),
        ("own mindspeed core", "own", "plain Megatron", ""),
    ],
)
def test_which_entry_script_runs_on_what(there, script, platform, note, tmp_path, monkeypatch):
    for name, (variable, files) in MACHINE.items():
        if variable:
            monkeypatch.delenv(variable, raising=False)
        for path, text in files.items() if name in there.split() else ():
            written(tmp_path / name / path, text)
            if variable:
                monkeypatch.setenv(variable, str(tmp_path / name))
    launch = CapturedLaunch(SCRIPT, (), 8, 1, tmp_path / "own", {}, {}, (), 1)
    entry = find_entry(launch, DENSE, tmp_path)
    assert entry.script == tmp_path / script / SCRIPT and entry.platform == f"{platform}, Megatron Core 0.12"
    assert entry.note.startswith(note) and bool(entry.note) == bool(note)
    assert tmp_path / "core" in entry.path and entry.mindspeed == platform.startswith("MindSpeed")
    if not script:
        text = entry.script.read_text()
        assert text.index("import mindspeed.megatron_adaptor") < text.index(str(tmp_path / "core" / SCRIPT))


@pytest.mark.parametrize("absent", [*CHECKOUTS, ""])
@pytest.mark.parametrize("given", ["--enable-hf2mg-convert", "--stage"])
def test_another_library_than_asked_for_is_refused(absent, given, tmp_path, monkeypatch):
    """A checkout that is not there, also beside one that is; what only MindSpeed-LLM has, without it."""
    for name in CHECKOUTS:
        monkeypatch.delenv(name, raising=False)
    if absent:
        monkeypatch.setenv(absent, f"{tmp_path}{os.pathsep}{tmp_path / 'gone'}")
    launch = CapturedLaunch("posttrain_gpt.py", (given, "sft"), 8, 1, tmp_path, {}, {}, (), 1)
    with pytest.raises(ValueError, match=f"{absent}={tmp_path / 'gone'} " if absent else f"has {given}: set "):
        find_entry(launch, DENSE, tmp_path)


def test_the_checkpoint_to_load_is_made_by_pretraining(tmp_path):
    tuning, plain = (written(tmp_path / name, "") for name in ("posttrain_gpt.py", SCRIPT))
    words = "--stage sft --neat-pack --reset-attention-mask --prompt-type qwen3 --mock-data --lr 1 --lora-fusion"
    words += " --lora-r 8 --lora-target-modules linear_qkv linear_proj"
    words += " --attention-mask-type general --cp-attention-mask-type causal"
    for script in (tuning, plain, tmp_path / "own.py"):
        flags = Flags.parse(words.split())
        assert pretraining(script, flags) == (plain if script == tuning else script)
        assert " ".join(flags.argv()) == "--mock-data --lr 1 --cp-attention-mask-type causal"
        flags = Flags.parse(["--qk-layernorm"])
        pretraining(script, flags)
        assert ("--spec" in flags) == (script == tuning)


def test_skipped_commands_are_shown(tmp_path):
    launch = CapturedLaunch("a.py", (), 8, 1, tmp_path, {}, {}, (), 1, ("rm -rf /data/run", "ray stop"), False)
    lines = outcome.not_exercised(launch, Entry(tmp_path / "a.py", ()), Flags.parse([]), 2)
    at = lines.index("commands of the script that were not run:")
    assert [line.strip() for line in lines[at + 1 : at + 3]] == ["rm -rf /data/run", "ray stop"]
    assert any("no Landlock" in line for line in lines)


def test_changed_flags_are_recorded_and_the_rest_stays():
    argv = "--tp 4 --tp 8 --bf16 --lr=1e-6 --moe-permute-fusion --use-fused-mlp --profile-x 3"
    flags = Flags.parse(argv.split())
    flags.set("--tp", 8, why="the same")
    flags.set("--tp", 2, why="fewer")
    flags.apply("less already", "--tp<=4 --absent<=4 --absent~1 --absent")
    remove_unavailable(flags, mindspeed=True)
    kept = "--tp 2 --bf16 --lr 1e-6 --no-gradient-accumulation-fusion --no-masked-softmax-fusion"
    assert flags.argv() == kept.split()
    assert flags.changes[0] == ("--tp", "8", "2", "fewer")
    removed = {c.flag: c.old for c in flags.changes if c.why.startswith("not on a host") and c.new is None}
    assert removed == {"--moe-permute-fusion": "", "--use-fused-mlp": "", "--profile-x": "3"}


# Arguments, with MindSpeed or without, what a host can take of them.
AVAILABLE = [
    ("--fp8-format hybrid --fp8-param-gather --apply-layernorm-1p --bf16", False, "--bf16"),
    ("--moe-permute-fusion --use-fused-mlp --profile-x 3 --bf16", True, "--bf16"),
    ("--moe-grouped-gemm --moe-tp-extend-ep", True, "--moe-grouped-gemm --moe-tp-extend-ep"),
    ("--moe-grouped-gemm --bf16", False, "--bf16"),
    ("--context-parallel-size 4 --transformer-impl x", False, "--context-parallel-size 1 --transformer-impl local"),
    ("--context-parallel-size 4 --transformer-impl x", True, "--context-parallel-size 4 --transformer-impl x"),
]


@pytest.mark.parametrize("words, mindspeed, left", AVAILABLE)
def test_what_no_host_has_is_taken_out_and_what_rl_refuses_is_said(words, mindspeed, left):
    """The rehearsal does not hide that the script could not run as it is."""
    flags, given = Flags.parse(words.split()), words.split()
    remove_unavailable(flags, mindspeed=mindspeed)
    assert {f: v for f, v in flags.values.items() if f in given} == Flags.parse(left.split()).values
    refused = [c.why for c in flags.changes if c.flag.startswith(("--fp8", "--apply"))]
    assert all(why.startswith("not on a host: ") and " RL " in why for why in refused)


def test_values_of_mindspeed_llm_are_replaced_without_it():
    words = "--spec mindspeed_llm.a b --moe-token-dispatcher-type alltoall_seq --moe-layer-freq -1"
    flags = Flags.parse(f"{words} --distributed-backend hccl".split())
    replace_mindspeed_llm(flags)
    expected = "--moe-token-dispatcher-type alltoall --distributed-backend nccl --eval-interval 1000"
    assert flags.argv() == expected.split()


SHORT = {"tp": "tensor-model-parallel-size", "pp": "pipeline-model-parallel-size", "cp": "context-parallel-size"}
SHORT |= {"ep": "expert-model-parallel-size", "batch": "global-batch-size", "layers": "num-layers"}
RL = "tp=4 pp=4 layers=28 batch=256 rl-algorithm=grpo rl-rollout-prompts=64 rl-generate-tp=4 rl-generate-ep=64"
ROWS = "layers=8 batch=64 cp=8"
HYBRID = ROWS + " context-parallel-algo=hybrid_cp_algo ulysses-degree-in-cp=4"
LISTED = "num-layer-list=17,20,22,21 pp=4 layers=80"
EXPERTS_APART = "moe-grouped-gemm gemm-gradient-accumulation-fusion moe-permutation-async-comm"
DUALPIPEV = "tp=2 pp=8 layers=64 schedules-method=dualpipev"
NOOP = "pp=8 layers=64 noop-layers=61,62,63 mla-mm-split"
# Under MindSpeed: flags of a script, ranks of the rehearsal, what is left; !FLAG: it is taken out.
SHRUNK = [
    # What was split stays split while there are ranks; a rollout is a batch of groups of four.
    (RL, 1, "tp=1 pp=1 layers=2 batch=4 rl-generate-tp=1 rl-generate-ep=1 rl-rollout-prompts=1"),
    (RL, 2, "tp=2 pp=1 batch=4 rl-generate-tp=2 rl-generate-ep=2"),
    (RL, 4, "tp=2 pp=2 layers=2 batch=4 rl-generate-tp=2 rl-generate-ep=4"),
    (RL, 8, "tp=2 pp=2 batch=8 rl-generate-ep=8 rl-rollout-prompts=2 rl-samples-per-prompt=4"),
    # Rows too; a hybrid of both ways takes four ranks.
    (f"{ROWS} tp=2", 4, "tp=2 cp=2 batch=4"),
    (f"{ROWS} pp=2", 4, "cp=2 pp=2 batch=4"),
    (f"{HYBRID} tp=2", 4, "tp=2 cp=1 batch=8 ulysses-degree-in-cp=2"),
    (HYBRID, 4, "cp=4 batch=4 ulysses-degree-in-cp=2"),
    # Stages of different sizes stay different.
    (LISTED, 1, "!num-layer-list layers=2"),
    (LISTED, 2, "num-layer-list=2,1 layers=3"),
    # Experts are stored as written; overlapped communication needs some apart, a stage of MindSpeed-LLM has some.
    (f"{EXPERTS_APART} moe-alltoall-overlap-comm ep=8", 1, f"{EXPERTS_APART} !moe-alltoall-overlap-comm ep=1"),
    (f"{EXPERTS_APART} moe-alltoall-overlap-comm ep=8", 2, f"{EXPERTS_APART} moe-alltoall-overlap-comm ep=2"),
    ("moe-tp-extend-ep pp=8 layers=61 first-k-dense-replace=3", 2, "moe-tp-extend-ep pp=2 layers=4"),
    ("pp=8 layers=61 first-k-dense-replace=3", 2, "first-k-dense-replace=1"),
    # Two layers a stage, one for each chunk of dualpipev, and as many micro-batches as its schedule needs.
    (DUALPIPEV, 2, "pp=1 !schedules-method"),
    (DUALPIPEV, 4, "pp=2 schedules-method=dualpipev layers=4 batch=4"),
    # One layer that does nothing, in a chunk that has another.
    (NOOP, 4, "pp=2 layers=4 noop-layers=3 mla-mm-split"),
    (f"{NOOP} num-layers-per-virtual-pipeline-stage=4", 4, "layers=8 noop-layers=7"),
    (f"{NOOP} num-layers-per-virtual-pipeline-stage=4", 4, "num-layers-per-virtual-pipeline-stage=2"),
    # An engine on a CPU has one size of latent attention.
    ("kv-lora-rank=512 qk-pos-emb-head-dim=64", 2, f"kv-lora-rank={CPU_LATENT_SIZE - 64} qk-pos-emb-head-dim=64"),
]


def pairs(words: str) -> list[tuple[str, str]]:
    """Flags, and their values as `Flags.get` has them."""
    named = (word.partition("=") for word in words.split())
    return [(f"--{SHORT.get(name, name)}", value) for name, _, value in named]


@pytest.mark.parametrize("words, ranks, left", SHRUNK)
def test_a_script_is_made_smaller_in_its_own_shape(words, ranks, left):
    flags = Flags({flag: tuple(filter(None, [value])) for flag, value in pairs(words)})
    remove_unavailable(flags, mindspeed=True)
    shrink(flags, ranks)
    for flag, value in pairs(left):
        assert flags.get(flag.replace("!", "")) == (None if "!" in flag else value), flag


@pytest.mark.parametrize("words, ranks", [("dp=8", 2), ("pp=4 tp=1", 2), ("pp=4 ep=8", 4), ("tp=8 pp=4 cp=2", 4)])
def test_more_ranks_where_there_is_more_to_split(words, ranks):
    assert ranks_of_split(Flags({flag: (value,) for flag, value in pairs(words)})) == ranks


@pytest.mark.parametrize("flag", [flag for flags in SUPPORTED.values() for flag in flags.split()])
def test_what_rl_supports_is_rehearsed(flag):
    flags = Flags(dict.fromkeys(("--num-layers", *(f"--{SHORT[name]}" for name in ("tp", "pp"))), ("8",)))
    flags.values.setdefault(flag, ("3",))
    remove_unavailable(flags, mindspeed=True)
    shrink(flags, 4)
    assert flag in flags


def test_a_refusal_is_shown_without_its_traceback():
    lines = ["Traceback (most recent call last):", '  File "x.py", line 3, in <module>']
    refusal = ["[rl] RL cannot run with these arguments:", "  - experts", "  - dropout"]
    assert tail(Done("arguments", 1, 1.0, [*lines, *refusal, "", "more"])) == "\n".join(refusal)
    crash = [*lines, "KeyError: 'step'"]
    assert tail(Done("training", 1, 1.0, crash)) == "\n".join(crash)
    launcher = ["W1 torch/distributed/elastic/multiprocessing/api.py:1028] closing", "ChildFailedError:"]
    assert tail(Done("training", 1, 1.0, ["rank 2 stops: no memory", *launcher])) == "rank 2 stops: no memory"
    assert "ended at its deadline after 1 s; last line: b" in tail(Done("training", None, 1.0, ["a", "b"]))


@pytest.mark.parametrize(
    "importer, owner",
    [("llm/mindspeed_llm/core/x.py", "MindSpeed-LLM"), ("mindspeed/core/x.py", "MindSpeed"), ("x.py", "the script")],
)
def test_a_missing_dependency_is_one_line(tmp_path, importer, owner):
    """As Python says it when a module of a checkout imports what is not installed."""
    written(tmp_path / importer, "import no_such_module.linalg\n")
    run = f"import runpy; runpy.run_path({str(tmp_path / importer)!r})"
    log = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True).stderr
    lines = [*log.splitlines(), "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: more"]
    said = tail(Done("arguments", 1, 1.0, [f"[rank0]: {line}" for line in lines]))
    assert said == (
        f"the Python module no_such_module is not installed, and {owner} needs it ({tmp_path / importer}, line 1): "
        "install it here, or put a folder that holds it on PYTHONPATH"
    )


@pytest.mark.parametrize("more, made", [([], "pretrained"), (["--enable-hf2mg-convert"], "hugging-face")])
def test_a_replaced_checkpoint_passes_the_check_of_the_start(more, made, tmp_path):
    """Which comes with the other checks of the arguments, before the rehearsal has made the checkpoint."""
    flags = Flags.parse(["--load", "/nowhere", "--hf-cfg-dir", "your", "config", "dir", *more])
    substitute(flags, tmp_path, mindspeed_llm=True)
    assert flags.get("--load") == str(tmp_path / made)
    assert flags.get("--hf-cfg-dir") == (flags.get("--load") if more else str(tmp_path / "hf-cfg-dir"))
    args = argparse.Namespace(save=str(tmp_path / "save"), load=flags.get("--load"), enable_hf2mg_convert=bool(more))
    args.num_layers, args.model_type_hf = 28, "qwen3"
    assert decide(args).kind == "pretrained" and list(conversion.problems(args)) == []


def test_layers_for_multi_token_prediction_are_not_converted(tmp_path):
    flags = Flags.parse(["--load", "/nowhere", "--enable-hf2mg-convert", "--mtp-num-layers", "1"])
    substitute(flags, tmp_path, mindspeed_llm=True)
    assert flags.get("--load") == str(tmp_path / "pretrained") and "--enable-hf2mg-convert" not in flags


@pytest.mark.parametrize("algorithm, evaluated", [("grpo", True), ("dpo", False)])
def test_evaluation_dump_save_and_resume_are_rehearsed(algorithm, evaluated, tmp_path):
    flags = Flags.parse(["--rl-algorithm", algorithm, "--train-iters", "400"])
    substitute(flags, tmp_path, mindspeed_llm=False)
    shrink(flags, 2)
    assert flags.get("--train-iters") == "2"
    for flag in ("--rl-eval-data", "--rl-eval-every", "--rl-dump-dir", "--save"):
        assert (flag in flags) == evaluated, flag


FEATURE = """
import no_such_library.part
from no_such_library import Base, register
try:
    import not_this_one
except ImportError:
    not_this_one = None
class Own(Base):
    @register
    def method(self):
        return 7
def use():
    return Base()
"""


def test_an_absent_module_serves_imports_and_nothing_else(tmp_path, monkeypatch, capsys):
    written(tmp_path / "mindspeed_llm" / "feature.py", FEATURE)
    written(tmp_path / "other_package.py", "import no_such_library_either")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    modules = set(sys.modules)
    absent_modules.install()
    try:
        feature = importlib.import_module("mindspeed_llm.feature")
        assert feature.not_this_one is None and feature.Own().method() == 7
        assert importlib.util.find_spec("no_such_thing") is None
        with pytest.raises(RuntimeError, match="no_such_library is not installed"):
            feature.use()
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("other_package")
    finally:
        for name in set(sys.modules) - modules:
            del sys.modules[name]
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{absent_modules.STANDIN}no_such_library ({tmp_path}/mindspeed_llm/feature.py, line 2)"]
    assert outcome.absent_modules(lines) == {"no_such_library"}


UPSTREAM = [pytest.mark.slow, pytest.mark.upstream, pytest.mark.timeout(900)]
SAID = ("not exercised:", "vLLM-Ascend", "folders that the script names", "HCCL_CONNECT_TIMEOUT", "ratio 1.000")


@pytest.mark.parametrize(
    "script, checkouts, platform, ranks, layers, here, small",
    [
        pytest.param(DENSE, (), "plain Megatron, Megatron Core 0.19", 8, 28, 2, 2, marks=[UPSTREAM[0], UPSTREAM[2]]),
        pytest.param(DENSE, CHECKOUTS[:2], "MindSpeed, Megatron Core 0.12", 8, 28, 2, 2, marks=UPSTREAM),
        pytest.param(DENSE, CHECKOUTS, "MindSpeed-LLM, Megatron Core 0.12", 8, 28, 2, 2, marks=UPSTREAM),
        pytest.param(EXPERTS, CHECKOUTS, "MindSpeed-LLM, Megatron Core 0.12", 16, 48, 4, 4, marks=UPSTREAM),
    ],
)
def test_rehearse(script, checkouts, platform, ranks, layers, here, small):
    """With these of the CHECKOUTS, and without MindSpeed-LLM where the launch script looks for it."""
    if absent := [name for name in checkouts if name not in os.environ]:
        pytest.skip(f"not set: {' '.join(absent)}")
    paths = dict.fromkeys(("LOAD", "SAVE", "HF_MODEL", "PROMPTS", "MINDSPEED_LLM"), "/nowhere")
    env = {k: v for k, v in os.environ.items() if k not in CHECKOUTS or k in checkouts} | paths
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    command = [sys.executable, "-W", "ignore", "-m", "mindspeed_rl_plugin", "rehearse", str(script), "--timeout", "250"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    out = done.stdout + done.stderr
    assert done.returncode == 0, out
    for said in (*SAID, f" on {platform}\n", f"arguments as written, for {ranks} ranks: ok"):
        assert said in out, out
    assert re.search(
        rf"one RL iteration \(grpo\) on {here} ranks: ok .*\n(.*\n)*.*rl 0/2 eval \|(.*\n)*.*rl 1/2 \|", out
    )
    assert re.search(rf"one more after a resume on {here} ranks: ok .*\n(.*\n)*.*rl 2/2 \|", out)
    assert re.search(rf"--num-layers +{layers} +{small} +smaller model", out)
    norm = re.search(r"iteration 1/ 2 \|.*grad norm: ([\d.]+)", out)
    assert float(norm[1]) > 1e-3, "the rewards differ, so there is a gradient"
