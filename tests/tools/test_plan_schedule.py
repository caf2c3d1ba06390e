"""`plan --schedule`: which schedules it tries for a script or a run, what it advises, and what it refuses."""

from __future__ import annotations

import dataclasses
import json

import pytest
from small_tokenizers import make

from mindspeed_rl_plugin.loop.arithmetic import Arithmetic
from mindspeed_rl_plugin.loop.run_setup import Setup
from mindspeed_rl_plugin.tools.plan import plan, which_schedule
from mindspeed_rl_plugin.tools.plan.simulate import Outcome
from mindspeed_rl_plugin.tools.plan.virtual import Graders

SCRIPT = """
torchrun --nproc_per_node 8 -m mindspeed_rl_plugin pretrain_gpt.py --tensor-model-parallel-size 2 \
  --global-batch-size 128 --micro-batch-size 1 --rl-algorithm grpo --rl-prompt-data x --rl-reward math \
  --rl-max-response-length 1024 --rl-generate-tp 2 --rl-reward-workers 4 {more}
"""


def script(folder, more=""):
    path = folder / "train.sh"
    path.write_text(SCRIPT.format(more=more))
    return path


@pytest.fixture
def said(capsys):
    """`said(words)`: what the plan prints, or its error."""

    def run(*words, status=0):
        assert plan.main(["--schedule", *map(str, words)]) == status
        out, err = capsys.readouterr()
        return err if status else out

    return run


def table(out):
    return [line.split() for line in out.splitlines() if line.startswith(("sync", "streamed", "async"))]


def run_of(folder, grading=1.0, call=1.0 * 4 / 64, together=1.0):
    """Three counted rollouts of a colocated run on two ranks: 8 s of generation, `grading` of grading, 3 of update."""
    setup = Setup(Arithmetic(8, 8, 64, 1, 1, 2, 2, 5), "sync", graders=4, limit=512)
    seconds = {"generate": 8.0, "reward": grading, "update": 3.0, "reshard": 0.5, "iteration": 11.5 + grading}
    line = {"response/length_mean": 200.0, "response/length_max": 512.0, "tokens_per_second_total": 64 * 216 / 12.5}
    line |= {"reward/call_seconds": call, "reward/worker_seconds": call / together}
    line |= {f"seconds/{name}": value for name, value in seconds.items()}
    folder.mkdir()
    lines = [json.dumps({"kind": "train", "iteration": n + 1, **line}) + "\n" for n in range(5)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "run.json").write_text(json.dumps({"setup": dataclasses.asdict(setup)}))
    return folder


def test_a_script_is_read(tmp_path):
    setup = which_schedule.script_setup(script(tmp_path, "--rl-max-staleness 3"))
    sizes = setup.sizes
    assert (sizes.prompts, sizes.members, sizes.data_parallel, sizes.engines) == (16, 8, 4, 4)
    assert (setup.trainer_ranks, setup.engine_ranks, setup.graders, setup.limit, setup.world) == (2, 2, 32, 1024, 8)
    apart = which_schedule.script_setup(
        script(tmp_path, "--rl-schedule async --rl-generators 4 --rl-max-staleness 0 --rl-async-order strict")
    )
    assert (apart.sizes.data_parallel, apart.sizes.engines, apart.world, apart.order) == (2, 2, 8, "strict")
    more = "--rl-schedule async --rl-generators 4 --rl-correction mask --rl-engine-url http://a:1 http://b:2"
    assert which_schedule.script_setup(script(tmp_path, more)).sizes.engines == 4, "two of ranks, two servers"


def test_schedules_that_divide_are_tried(tmp_path):
    setup = which_schedule.script_setup(script(tmp_path))
    tried = list(which_schedule.candidates(setup, 8, 8))
    assert [(s.schedule, s.sizes.data_parallel, s.sizes.engines) for s in tried] == [
        ("sync", 4, 4), ("streamed", 4, 4), ("async", 2, 2), ("async", 1, 3),
    ]  # fmt: skip
    assert [s.graders for s in tried] == [32, 32, 16, 8]  # those of the ranks that train
    assert [s.world for s in tried] == [8] * 4
    machines = list(which_schedule.candidates(setup, 32, 8))[2:]  # whole ones; 12 trainers do not divide the batch
    assert [(s.sizes.data_parallel, s.sizes.engines) for s in machines] == [(8, 8), (4, 12)]
    with pytest.raises(ValueError, match="6 ranks do not divide"):
        list(which_schedule.candidates(setup, 6, 8))
    joined = dataclasses.replace(setup, schedule="async", sizes=dataclasses.replace(setup.sizes, engines=1))
    with pytest.raises(
        ValueError, match=r"10 ranks \(8 that train, 2 of engines\) do not divide: .* --world, such as 8"
    ):
        list(which_schedule.candidates(joined, joined.world, 8))


@pytest.mark.parametrize(
    ("more", "tried", "flag"),
    [
        ("--rl-reward-model-device accelerator", ["sync", "streamed"], "--rl-reward-model-device accelerator"),
        ("--rl-filtration pow --rl-filtration-whole-batch", ["sync"], "--rl-filtration-whole-batch"),
    ],
)
def test_what_flags_exclude_is_not_advised(tmp_path, said, more, tried, flag):
    path = script(tmp_path, more)
    assert [one.schedule for one in which_schedule.candidates(which_schedule.script_setup(path), 8, 8)] == tried
    out = said(path)
    assert f"note    {flag} excludes --rl-schedule async\n" in out and "use --rl-schedule async" not in out


def test_a_script_that_shares_prompts_says_what_this_saves(tmp_path, said):
    flags = "--rl-share-prompts --rl-max-tokens-per-microbatch 4096"
    words = ("--prompt-tokens", 512, "--response-tokens", 64, "--tail", 0)
    out = said(script(tmp_path, flags), *words)
    assert "shared  a group of 8 computes 1024 instead of 4608 tokens a pass: prompts of 512, responses of 64" in out
    plain = said(script(tmp_path), *words)
    assert "shared  " not in plain
    assert float(table(out)[0][1]) < float(table(plain)[0][1]), "seconds of an iteration of sync"


def test_a_run_gives_the_costs_and_the_table_an_advice(tmp_path, said):
    folder = run_of(tmp_path / "rl")
    out = said("--from", folder, "--world", 4)
    assert [row[0] for row in table(out)] == ["sync", "streamed", "async", "async"]
    assert [row[1] for row in table(out)[2:]] == ["2", "3"] and "fitted to 1 run: " in out
    # On the ranks of the run itself sync takes what it took.
    assert float(table(said("--from", folder))[0][1]) == pytest.approx(12.5, rel=0.03)


@pytest.mark.parametrize(("together", "judged"), [(64, "{}\n"), (1, "{}: THE MODEL MISSES THIS RUN, ")])
def test_calls_at_once_are_modelled_and_a_model_that_misses_a_run_says_so(tmp_path, said, together, judged):
    """64 responses whose calls take 2 s: together 2 s, one after the other in each of four workers 32 s. The run is
    compared without costs of other machines."""
    folder = run_of(tmp_path / "rl", grading=2.0, call=2.0, together=together)
    out = said("--from", folder)
    judged = f"the model gives {judged.format(table(out)[0][1])}"
    assert f"measured 13.50 s an iteration, sync; {judged}" in out
    assert f"grading a response takes 2 s, {4 * together} at the same time" in out
    assert all(judged in said("--from", folder, cost, 60) for cost in ("--step-ms", "--grade-s", "--reshard-s"))


@pytest.mark.parametrize(("at_once", "seconds"), [(1.5, 8.0), (6.0 - 1e-9, 2.0), (1.0, 12.0)])
def test_a_capacity_need_be_no_whole_number(at_once, seconds):
    graders = Graders(at_once)
    assert max(graders.grade(0.0, 1.0) for _ in range(12)) == pytest.approx(seconds)


def test_a_script_with_the_flags_of_the_run_has_its_table(tmp_path, said):
    """How long prompts are, and how many calls are made at once, no flag says."""
    folder = run_of(tmp_path / "rl", call=2.0, together=64)
    flags = "--nproc_per_node 2 -m mindspeed_rl_plugin pretrain_gpt.py --global-batch-size 64 --micro-batch-size 1"
    flags += " --rl-algorithm grpo --rl-prompt-data x --rl-reward math --rl-max-response-length 512"
    flags += " --rl-rollout-prompts 8 --rl-samples-per-prompt 8 --rl-reward-workers 2"
    (tmp_path / "same.sh").write_text(f"torchrun {flags}\n")
    assert table(said(tmp_path / "same.sh", "--from", folder)) == table(said("--from", folder)) != []


COSTS = "--step-ms 20, --sequence-ms 0.05, --train-tokens 8000, --reshard-s 5, --publish-s 1, --pull-s 3, --apply-s 0.5"
GIVEN = COSTS.replace(",", "") + " --grade-s 0 --response-tokens 400 --tail 0.8 --prompt-tokens 90"
OF_RUN = "--sequence-ms 0.2475, --publish-s 0.5, --pull-s 0.5, --apply-s 0.5"


# A script or a run, further options, what is said to be assumed.
@pytest.mark.parametrize(
    ("source", "options", "assumed"),
    [
        ("SCRIPT", "", f"{COSTS}, --grade-s 0, --response-tokens 409.6, --tail 0.8, --prompt-tokens 0"),
        ("SCRIPT", "--grade-s 2 --prompt-tokens 9 --tail 1", f"{COSTS}, --grade-together 1, --response-tokens 409.6"),
        ("SCRIPT", GIVEN, ""),
        ("RUN", "--pull-s 1", "--sequence-ms 0.2475, --publish-s 0.5, --apply-s 0.5"),
        ("RUN", "--response-tokens 100", f"{OF_RUN}, --tail 0.8"),
        ("RUN", "--tail 0.5", OF_RUN),
    ],
)
def test_what_is_assumed_is_said_at_the_advice_and_what_is_given_or_measured_is_not(
    tmp_path, said, source, options, assumed
):
    words = [script(tmp_path)] if source == "SCRIPT" else ["--from", run_of(tmp_path / "rl")]
    out = said(*words, *options.split())
    if assumed:
        assert f"\nASSUMED, NOT MEASURED: {assumed}\nif these values are right: use " in out
    else:
        assert "ASSUMED" not in out and "\nuse " in out


def test_prompts_of_a_script_are_as_long_as_a_run_renders_them(tmp_path, said, monkeypatch):
    """`words` has a token a character; a prompt of 2,000 is longer than --rl-max-prompt-length."""
    make("words", "chatml").save_pretrained(tmp_path / "tokenizer")
    for name, texts in (("a", ["1", "12", "1" * 2000]), ("b", ["1234567"])):
        rows = "".join(json.dumps({"q": text, "answer": "2"}) + "\n" for text in texts)
        (tmp_path / f"{name}.jsonl").write_text(rows)
    words = f"--rl-prompt-data {tmp_path}/a.jsonl {tmp_path}/b.jsonl --rl-tokenizer {tmp_path}/tokenizer"
    words += " --rl-apply-chat-template --rl-prompt-key q"

    frame = len("Suser\n" + "E\nSassistant\n")  # S and E are control tokens
    line = "prompts mean {} tokens, of at most the first 100 rows of each file of --rl-prompt-data\n"
    out = said(script(tmp_path, words))
    assert line.format(frame + 3) in out and "--prompt-tokens" not in out
    monkeypatch.setattr(which_schedule, "ROWS", 1)
    assert line.format(frame + 4) in said(script(tmp_path, words))
    assert "prompts mean" not in said(script(tmp_path, f"{words} --rl-prompt-key answers"), "--prompt-tokens", 9)
    out = said(script(tmp_path, f"{words} --rl-prompt-data {tmp_path}/none.jsonl"))
    assert "--prompt-tokens 0\n" in out and "prompts mean" not in out
    assert "a.jsonl line 1 has no field 'x'" in said(script(tmp_path, f"{words} --rl-prompt-key x"), status=1)


def test_a_run_that_tells_nothing_of_decode_steps_and_one_whose_engines_change(tmp_path, said):
    folder = run_of(tmp_path / "rl")
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({"setup": record["setup"] | {"schedule": "async"}}))
    assert "these runs or options give a decode step of 0 ms" in said("--from", folder, status=1)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines = [json.dumps(json.loads(line) | {"engines": 2.0 + (n == 4)}) + "\n" for n, line in enumerate(lines)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    out = said("--from", folder, "--step-ms", 30)
    assert f"note    {folder} had 2 to 3 engines at work; the model has 2" in out and " s an iteration, async\n" in out
    assert "--reshard-s 0, " in out and "--step-ms" not in out


@pytest.mark.parametrize(
    ("seconds", "advised"),
    [
        ((10.0, 9.9, 9.95), "sync: no other schedule gains 2%"),
        ((10.0, 8.0, 7.9), "streamed: 1.25 times as fast as sync"),
        ((10.0, 8.0, 5.0), "async --rl-generators 2 --rl-max-staleness 1 (and a --rl-correction): 2.00 times as fast"),
    ],
)
def test_the_advice_is_the_simplest_that_is_nearly_fastest(seconds, advised):
    setup = Setup(Arithmetic(8, 8, 64, 1, 1, 2, 2, 5))
    setups = [dataclasses.replace(setup, schedule=name) for name in ("sync", "streamed", "async")]
    outcomes = [Outcome(2 * s, s, {}, {}, 0.0, 0.0) for s in seconds]
    assert which_schedule.advice(setups, outcomes).startswith(f"use --rl-schedule {advised}")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "give a launch script with RL flags, or a run of yours by --from RUN_DIR"),
        (["--from", "nowhere"], "nowhere is not a directory"),
        (["--from", "RUN", "--world", "0"], "--world must be at least 1, got 0"),
        (["--from", "RUN", "--step-ms", "-1"], "--step-ms must be at least 0, got -1.0"),
        (["--from", "RUN", "--response-tokens", "600"], "a mean of 600 tokens is not between 1 and the limit of 512"),
        (["--from", "RUN", "--world", "3"], "3 ranks do not divide"),
        (["plain.sh"], "has no --rl-algorithm that samples responses"),
        (["train.sh"], "the model has no partial rollouts"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, monkeypatch, said, words, problem):
    monkeypatch.chdir(tmp_path)
    script(tmp_path, "--rl-schedule streamed --rl-carry-unfinished --rl-correction truncate")
    (tmp_path / "plain.sh").write_text("torchrun --nproc_per_node 2 pretrain_gpt.py --global-batch-size 4\n")
    words = [run_of(tmp_path / "rl") if word == "RUN" else word for word in words]
    assert problem in said(*words, status=1)
