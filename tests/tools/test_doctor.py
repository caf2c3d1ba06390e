"""The checks' functions and the command `doctor`, without engines and jobs; faults are in test_doctor_faults.py."""

import dataclasses
import json
import os
import socket
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from mindspeed_rl_plugin.__main__ import main
from mindspeed_rl_plugin.rows import Completion, SampleId
from mindspeed_rl_plugin.tools.doctor import compare, doctor, engine_checks, nodes, program, small_models, train_checks
from mindspeed_rl_plugin.tools.doctor.machine import FILES, PORTS
from mindspeed_rl_plugin.tools.doctor.nodes import Nodes
from mindspeed_rl_plugin.tools.doctor.result import FAIL, NOT_RUN, PASS, explained, guilty, table, without_private
from mindspeed_rl_plugin.tools.rehearse.capture import Done

pytestmark = pytest.mark.quick


def failed(check, where=""):
    return check.result(False, "1", where, nats=1, mib=1, noise=1, ratio=1, rank=1, seconds=1, thread="", need=1)


def test_a_failure_follows_only_from_an_earlier_check_of_the_same_model():
    one_device, arrive, where = doctor.machine.OWN_DEVICE, train_checks.ARRIVE, train_checks.WHERE
    wrong = [failed(where, "dense, pp"), failed(arrive, "dense"), failed(where, "experts"), failed(arrive, "latent")]
    named = explained(wrong, doctor.ALL_CHECKS)
    assert [r.follows for r in named] == ["trainer: weights arrive (dense)", "", "", ""]
    text = table(named)
    assert "may follow from trainer: weights arrive (dense)" in text and arrive.fix in text
    named = explained([*wrong, failed(one_device), failed(doctor.machine.DISK_CHECK)], doctor.ALL_CHECKS)
    assert [r.check for r in guilty(named)] == [one_device.name, doctor.machine.DISK_CHECK.name], (
        "a disk explains nothing"
    )
    named = explained([failed(doctor.machine.VARIABLES_CHECK, "X"), failed(arrive, "dense")], doctor.ALL_CHECKS)
    assert [r.follows for r in named] == ["", ""], "it can explain an engine that does not sleep, no lost weights"
    loaded = engine_checks.LOADED
    named = explained([failed(where, "dense"), failed(loaded, "dense"), failed(loaded, "experts")], doctor.ALL_CHECKS)
    assert [r.follows for r in named] == [f"engine: {loaded.name} (dense)", "", ""]


def test_an_end_between_two_checks_is_a_failure(tmp_path, monkeypatch):
    passed, table = [dataclasses.asdict(engine_checks.BUILD.result(True, "3 s", "dense"))], engine_checks.ENGINE_CHECKS

    def run(command, log, seconds, **_):
        (tmp_path / "x" / "rank-0.jsonl").write_text(json.dumps({"results": passed}) + "\n")
        return Done("log", 1, 3.0, ["RuntimeError: at the end"])

    monkeypatch.setattr(program, "run", run)
    found = program.run_checks("m", table, Nodes(1), tmp_path / "x", 9.0, {}, "float32", "models.json", "dense")
    (one,) = guilty(explained(found, doctor.ALL_CHECKS))
    assert (one.check, len(found)) == (
        engine_checks.GRAPHS.name,
        len(table),
    ) and "RuntimeError: at the end" in one.figure


@pytest.mark.parametrize(("error", "told"), [("TimeoutError", "hung for "), ("ConnectionError", "died after ")])
def test_a_killed_rank_is_told_from_a_stopped_one(tmp_path, monkeypatch, error, told):
    """torchrun kills the stopped one at last."""
    check, *_ = table = doctor.rank_checks.COLLECTIVES
    waited = [dataclasses.asdict(check.ended(program.WAITED, f"{error}: all_reduce"))]

    def run(command, log, seconds, **_):
        about = {"part": check.part, "name": check.name, "where": "", "at": time.time()}
        for rank, line in enumerate(({"results": waited}, about)):
            (tmp_path / "x" / f"rank-{rank}.jsonl").write_text(json.dumps(line) + "\n")
        return Done("log", 1, 3.0, ["rank : 1 (local_rank: 1)", "exitcode : -9 (pid: 7)"])

    monkeypatch.setattr(program, "run", run)
    (one,) = guilty(explained(program.run_checks("m", table, Nodes(2), tmp_path / "x", 9.0, {}), doctor.ALL_CHECKS))
    assert one.check == check.name and one.told.startswith(f"rank 1: {told}")


def test_each_check_is_in_the_table_once():
    names = [(check.part, check.name) for check in doctor.ALL_CHECKS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("connect to 10.0.0.17:29500 failed", "connect to ... failed"),
        ("no /home/me/My Project/x.json: give another", "no ...: give another"),
        ("~/data/train.jsonl, and ckpts/secret/iter_0000001", "..., and ..."),
        ("hdfs://nn1:9000/user/bob and user@git.corp", "... and ..."),
        ("VLLM_ATTENTION_BACKEND=FLASHINFER cannot be used", "VLLM_ATTENTION_BACKEND=... cannot be used"),
        ("fe80::1:29500 refused", "... refused"),
        *((text, text) for text in ("1/2 of input/output, 0.5 nats", "12.5 GB/s (3 tokens/s).", "reward/mean: 0.5")),
        ("no file 'data/secret.jsonl'", "no file '...'"),
        ("no data/secret.jsonl, ./data or ../secret.jsonl", "no ..., ... or ..."),
        ("acme/secret-model and acme/secret lack reward/mean/secret", "... and ... lack ..."),
        ("rank 7 on node-b of vllm 0.18.0 at node-b.cluster", "rank 7 on ... of vllm 0.18.0 at ..."),
    ],
)
def test_private_texts_are_taken_out(text, cleaned):
    assert without_private(text, {"node-b", "node-b.cluster", "vll"}) == cleaned


def test_the_page_holds_the_results_and_no_name_of_the_machine():
    host = socket.gethostname()
    page = doctor.page([PORTS.result(False, f"{host} </script><b> /a/b/c")], {host}, "1 is at fault")
    data = json.loads(page.partition('id="doctor">')[2].partition("</script>")[0])
    assert data["results"][0]["figure"] == "... </script><b> ..." and host not in page
    assert data["device"] and "torch" in data["versions"] and "<b>" not in page


def test_a_user_without_a_name_gets_results(monkeypatch):
    """As in a container whose user id is in no list of users."""
    for name in ("USER", "LOGNAME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 987654)
    results, names = Nodes(1).gather([FILES.result(True, "9", need=1)])
    assert len(results) == 1 and "" not in names and socket.gethostname() in names


def test_the_short_name_of_a_machine_is_private(monkeypatch):
    monkeypatch.setattr(nodes.socket, "gethostname", lambda: "gpu01.cluster.corp")
    monkeypatch.setattr(nodes.socket, "getfqdn", lambda: "7.cluster.corp")
    names = Nodes(1).gather([])[1]
    assert without_private("7 of gpu01:29500, gpu01.cluster.corp", names) == "7 of ...:29500, ..."


class Layer(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.input_layernorm, self.self_attn, self.mlp = nn.LayerNorm(2), nn.Linear(2, 2), nn.Linear(2, 2)
        self.layer_number = number + 1


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens, self.norm = nn.Embedding(4, 2), nn.LayerNorm(2)
        self.layers = nn.ModuleList(map(Layer, range(2)))


LAYERS = [f"{part} of layer {n}" for n in (0, 1) for part in ("attention", "MLP")]
PLACES = ["embedding", *LAYERS, "last norm", "logits"]


def test_places_of_both_models_have_the_same_names():
    inner = Inner()
    whole, chunk = nn.Module(), nn.Module()
    whole.model, whole.logits_processor = inner, nn.Identity()
    assert list(compare.engine_places(nn.Sequential(whole))) == PLACES
    chunk.embedding, chunk.pre_process, chunk.post_process = inner.embed_tokens, True, True
    chunk.output_layer = nn.Linear(2, 4)
    chunk.decoder = nn.Module()
    chunk.decoder.layers, chunk.decoder.final_layernorm = inner.layers, inner.norm
    assert list(compare.trainer_places([chunk], ())) == PLACES
    chunk.pre_process, chunk.post_process, noop = False, False, nn.Module()
    noop.layer_number = 1
    for number, layer in enumerate(inner.layers):
        layer.layer_number = number + 2
    chunk.decoder.layers = nn.ModuleList([noop, *inner.layers])
    assert list(compare.trainer_places([chunk], (0,))) == PLACES[1:-1]


def test_the_first_place_beyond_the_noise_is_named():
    ours = {
        "embedding": [torch.ones(4, 2)],
        "attention of layer 0": [torch.ones(4, 2)],
        "MLP of layer 0": [torch.ones(4, 2)],
    }
    theirs = {name: [t[0].clone()] for name, t in ours.items()}
    line = compare.parts(theirs, ours, ([-1.0], [-1.0]), 0.01, 1)
    assert line["first"] is None and line["far"][compare.LOG_PROBS] == 0
    theirs["MLP of layer 0"][0] += 1
    theirs["attention of layer 0"][0][2, 1] = float("nan")
    line = compare.parts(theirs, ours, ([-1.0], [-1.5]), 0.01, 1)
    assert line["first"] == {"place": "attention of layer 0", "token": 2}
    theirs["attention of layer 0"][0][2, 1], theirs["MLP of layer 0"][0][:] = 1, 1
    theirs["last norm"] = [torch.ones(20, 2)]
    theirs["last norm"][0][len(compare.PROMPT) + 2 :] = 9
    line = compare.parts(theirs, {"last norm": [torch.ones(20, 2)]}, ([-1.0, 0.0], [-1.0, 9.0]), 0.01, 1)
    assert line["first"] is None, "behind a token that they do not have in common nothing is compared"
    shard, logits = torch.ones(8, 3), {"logits": [torch.ones(8, 5)]}
    for width, first in ((5, None), (4, {"place": "logits", "token": len(compare.PROMPT) + 1})):
        logits["logits"][0][2:, width:] = 7
        line = compare.parts(logits, {"logits": [shard]}, ([], []), 0.01, 8, tp=1)
        assert line["first"] == first, "the second of two ranks, whose last column is padding"
    assert compare.parts(logits, {"logits": [shard]}, ([], []), 0.01, 8, tp=0)["first"] is None
    line = compare.parts({}, {}, ([-1.0], [-1.5]), 0.01, 1)
    assert line["first"]["place"] == compare.LOG_PROBS, "a rank of the last stage whose outputs are equal"


def test_outputs_are_copied_before_later_operators_change_them():
    module = nn.Identity()
    with compare.recorded({"here": module}, lambda _, output: output) as seen:
        module(torch.zeros(2, 2)).add_(1)
        module((torch.zeros(1, 2), None))
    assert [t.sum().item() for t in seen["here"]] == [0, 0]
    module(torch.ones(1))
    assert len(seen["here"]) == 2, "the hook is gone"


def test_log_probs_are_those_of_temperature_and_top_p():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    within = (logits / 0.5)[:, :2].log_softmax(-1)  # 0.87, 0.12, 0.02
    done = Completion(SampleId(0, 0, 0), (1,), (float(within[0, 1]),), "length", ((0, 0),))
    assert engine_checks._difference(logits, done, temperature=0.5, top_p=0.9) < 1e-6
    assert engine_checks._difference(logits, done) > 0.1


def ended(*lines, code=1):
    return Done("job", code, 9.0, list(lines))


def test_what_a_job_says_at_its_end_is_told_apart(capsys):
    def verdicts(done, trained=()):
        return {r.check: (r.verdict, r.figure) for r in train_checks._ran("dense", done, trained)}

    assert {v for v, _ in verdicts(ended(code=0), [{}] * 3).values()} == {PASS}
    lost = verdicts(ended("[rank0]: mindspeed_rl_plugin.weights.verify.WeightMismatch: a differs on rank 1"))
    assert (
        lost[train_checks.ARRIVE.name] == (FAIL, "a differs on rank 1") and lost[train_checks.FINITE.name][0] == NOT_RUN
    )
    broken = verdicts(ended("x.BrokenWeights: NaN in b of rank 1"))
    assert broken[train_checks.FINITE.name] == (FAIL, "NaN in b of rank 1")
    other = verdicts(ended("[rank1]: ImportError: libhccl.so", "nanobind: leaked 64 types!"))
    assert other[train_checks.RUNS.name] == (FAIL, "ImportError: libhccl.so")
    assert [verdict for verdict, _ in other.values()].count(FAIL) == 1
    secret = ended("[rank1]: acme.secret.GradeError: no module named secret_project")
    *_, users = train_checks._ran("dense", secret, (), users=True)
    assert (users.verdict, users.figure) == (FAIL, "GradeError: its message is printed above")
    assert "secret_project" in capsys.readouterr().err


def test_a_message_of_the_users_own_launch_is_printed_and_is_in_no_result(tmp_path, monkeypatch, capsys):
    jobs, message = [], "[rank0]: ValueError: prompt of mine"
    monkeypatch.setattr(
        train_checks.TrainBench, "job", lambda self, folder, argv, **k: jobs.append(argv) or ended(message)
    )
    words = ("--rl-algorithm", "grpo", "--rl-max-response-length", "8192", "--rl-overlong-buffer", "512")
    bench = train_checks.TrainBench(Nodes(2), tmp_path, None, {}, "float32", words)
    found, where = train_checks.compare_launch(bench)
    assert (found.verdict, found.figure) == (FAIL, "ValueError: its message is printed above")
    assert where.verdict == NOT_RUN, "it ended before the comparison"
    assert " --rl-max-response-length 64 " in f" {' '.join(jobs[0])} " and "--rl-overlong-buffer" not in jobs[0]
    assert "prompt of mine" in capsys.readouterr().err
    split = dataclasses.replace(bench, arguments=("--context-parallel-size", "2"))
    with pytest.raises(ValueError, match="its ranks have parts of a sequence"):
        list(train_checks.compare_launch(split))


def test_the_first_version_that_parts_is_told(tmp_path):
    assert train_checks._where("dense", tmp_path).verdict == NOT_RUN
    good = {"version": 0, "noise": 0.1, "far": {"embedding": 0.01}, "first": None}
    bad = {"version": 1, "noise": 0.1, "far": {"embedding": 2.0}, "first": {"place": "embedding", "token": 9}}
    (tmp_path / "parts-0.jsonl").write_text(json.dumps(good) + "\n")
    assert train_checks._where("dense", tmp_path).figure == "largest difference 0.01"
    (tmp_path / "parts-1.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(bad) + "\n")
    where = train_checks._where("dense", tmp_path)
    assert (where.verdict, where.figure) == (FAIL, "embedding: 2 on rank 1, token 9 in decoding, weights 1")


def test_memory_that_is_not_given_back_is_in_the_peaks_of_all_stages():
    lines = [{"peak_bytes/update": 9, "peak_bytes/generate": 5}, {"peak_bytes/update": 19, "peak_bytes/generate": 6}]
    assert train_checks._growth([lines[0], *lines]) == 1


@pytest.mark.parametrize("name", small_models.SMALL_MODELS)
def test_all_tensors_differ_between_two_seeds(name):
    config = small_models.models_of(())[0][name]
    one, two = (small_models.random_weights(config, seed, torch.bfloat16) for seed in (0, 1))
    assert one.keys() == two.keys() and not any(torch.equal(one[n], two[n]) for n in one)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--compare"], "--compare needs SCRIPT.sh, a launch script with --rl-* flags and --load"),
        (["nowhere.sh"], "no such file"),
        (["--job", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_said_with_status_1(argv, said, capsys):
    assert main(["doctor", *argv]) == 1
    assert said in capsys.readouterr().err


def test_a_script_without_rl_cannot_be_compared(tmp_path, capsys):
    script = tmp_path / "launch.sh"
    script.write_text("torchrun --nproc-per-node 2 pretrain_gpt.py --num-layers 2 --bf16\n")
    assert main(["doctor", "--compare", str(script)]) == 1
    assert "it has no --rl-algorithm; add its --rl-* flags" in capsys.readouterr().err


def test_ranks_that_torchrun_started_beside_the_first_of_a_machine_leave(monkeypatch):
    for name, value in dict(RANK=1, LOCAL_RANK=1, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2, GROUP_RANK=0).items():
        monkeypatch.setenv(name, str(value))
    assert main(["doctor"]) == 0


def test_a_healthy_part_ends_with_status_0_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(doctor.tempfile, "tempdir", str(tmp_path))
    made = [FILES.result(True, "9", need=1)]
    monkeypatch.setattr(doctor.machine, "machine_results", lambda *a: iter(made))
    assert main(["doctor", "--only", "machine", "--out", str(tmp_path / "doctor.html")]) == 0
    assert "nothing is at fault" in capsys.readouterr().out and os.listdir(tmp_path) == ["doctor.html"]
    made[0] = FILES.result(False, "9", need=99)
    assert main(["doctor", "--only", "machine", "--keep", str(tmp_path / "kept")]) == 1
    said = capsys.readouterr().out
    assert "1 is at fault" in said and "ulimit -n 99" in said and (tmp_path / "kept").is_dir()


def test_results_are_not_lost_with_the_first_machine(monkeypatch):
    monkeypatch.setattr(nodes, "GONE_SECONDS", 0.1)
    second = Nodes(1, count=2, index=1, store=HashStore())
    with pytest.raises(ConnectionError, match=r"(?s)the first machine is gone.*open files +FAIL"):
        second.gather([FILES.result(False, "9", need=512)])
    second.store.set("doctor/done", "")
    assert second.gather([])[0] == []


def test_without_a_device_the_message_says_where_to_look(monkeypatch, capsys):
    none = SimpleNamespace(is_cpu=False, kind="cuda", api=SimpleNamespace(device_count=lambda: 0))
    monkeypatch.setattr(nodes, "get_device", lambda: none)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert doctor.main([]) == 1
    assert "no cuda device is visible: look at MINDSPEED_RL_DEVICE and *_VISIBLE_DEVICES" in capsys.readouterr().err


def test_a_model_that_vllm_or_transformers_lacks_is_not_judged(monkeypatch, tmp_path):
    config = small_models.models_of(())[0]["experts"]
    monkeypatch.setattr(small_models.vllm_api, "architectures", lambda: ["Qwen3ForCausalLM"])
    results = [
        r for call in engine_checks.EngineBench("experts", config, "float32", tmp_path).steps() for r in call.results()
    ]
    assert {r.verdict for r in results} == {NOT_RUN} and {r.figure for r in results} == {
        "this vLLM has no Glm4MoeForCausalLM"
    }
    assert "transformers" in small_models.unknown({**config, "model_type": "nobody"})


def test_a_part_that_did_not_run_is_no_part_that_is_well(monkeypatch, capsys):
    """Without Megatron the trainer's checks do not run, which the verdict must say."""
    monkeypatch.setattr(doctor, "find_entry", lambda *a: (_ for _ in ()).throw(ValueError("Megatron is not installed")))
    assert doctor.main(["--only", "trainer"]) == 0
    said = capsys.readouterr().out
    assert said.count("Megatron is not installed") == len(train_checks.TRAIN_CHECKS)
    assert "nothing is at fault (0 of 9 checks ran; not checked at all: trainer)" in said


def test_only_a_model_that_the_engine_lacks_is_not_trained(monkeypatch, tmp_path):
    """One whose engine did not come to run, since another one's died, may be well."""
    build = engine_checks.BUILD
    found = [build.not_run(program.EARLIER, "experts"), build.not_run("this vLLM has no X", "latent attention")]
    monkeypatch.setattr(doctor, "run_checks", lambda *a: found)
    one = doctor._Doctor(SimpleNamespace(script=None), Nodes(1), tmp_path)
    assert list(one._engine(SimpleNamespace(arguments=()), "float32", True)) == found
    assert one.unknown == {"latent attention": "this vLLM has no X"}
