"""What a start refuses, by rule and value: the table of refusals.py, and walks over the tables that refusals are made
of."""

import argparse
import dataclasses
import importlib.util
import math
import os
import re
import sys
import types
from pathlib import Path

import pytest
from checkouts import checkouts
from refusals import (
    AGENT,
    ASYNC,
    CARRY,
    CP2,
    DEEPSEEK,
    DPO,
    DROP,
    ELSEWHERE,
    LATENT,
    LIMITED,
    MINDSPEED,
    MOE,
    PACKED,
    REFUSED,
    REPLAY,
    ROWS,
    RULES,
    SHARED,
    SPREAD,
    check_golden,
    problems_of,
    sections,
)

from mindspeed_rl_plugin.algorithms.estimators import ADVANTAGES
from mindspeed_rl_plugin.checks import flag_checks, upstream_checks
from mindspeed_rl_plugin.checks.refusal import lines_of
from mindspeed_rl_plugin.checks.refused_flags import (
    OFF,
    OWN_RL,
    ROUTING,
    RUN,
    UPSTREAM,
    WHOLE,
    model_refusals,
    refusals,
)
from mindspeed_rl_plugin.checks.unsupported_models import GPT3, MODEL_FLAGS, SPECS
from mindspeed_rl_plugin.config import RLConfig, flag_name, flag_names, limit_problems
from mindspeed_rl_plugin.engine.engine_sizes import engine_problems
from mindspeed_rl_plugin.host import engine_env
from mindspeed_rl_plugin.launch.read_inputs import read_inputs
from mindspeed_rl_plugin.layout.shape import ModelShape

pytestmark = pytest.mark.quick

MODELS = Path(__file__).parents[2] / "docs" / "bring-your-model.md"
FAMILIES = REFUSED["unsupported_models.unbuilt_family"]
GOOD = [
    {},
    *({"--rl-algorithm": name} for name in ("grpo", "dapo", "dr-grpo", "rloo", "reinforce++", "gspo", "cispo")),
    PACKED,
    DPO | {"--rl-dpo-loss": "ipo", "--rl-rejected-key": "worse", "kv_channels": 16},
    DPO | SHARED | {"--rl-max-tokens-per-microbatch": "96"},
    {"--rl-filtration": "best-worst"},
    {"--rl-filtration": "best-worst", "--rl-schedule": "streamed"},
    ASYNC,
    ASYNC | {"--rl-correction": None, "--rl-max-staleness": "0"},
    CARRY | {"--rl-oversample": "3", "--rl-max-staleness": "2"},
    DROP | {"--rl-algorithm": "dapo"},
    {"--rl-algorithm": "reinforce++", "--rl-filtration": "pow", "--rl-filtration-whole-batch": ""}
    | {"--rl-samples-per-prompt": "1"},
    {"--rl-algorithm": "ppo", "--rl-advantage": "reinforce++"},
    {"--rl-algorithm": "ppo", "--rl-critic-lr": "1e-5", "--rl-critic-warmup": "2"},
    {"--rl-loss": "sapo", "--rl-correction": "truncate"},
    MOE | {"expert_model_parallel_size": 2},
    MOE | SPREAD,
    MOE | {"--rl-generate-ep": "4"},
    MOE | {"seq_aux": True, "moe_aux_loss_coeff": 0.0, "--rl-max-tokens-per-microbatch": "64"},
    CP2 | {"--rl-max-tokens-per-microbatch": "64"},
    CP2 | {"seq_length": 68},
    *(MINDSPEED | {"context_parallel_algo": f"{name}_cp_algo"} for name in ("megatron", "ulysses", "hybrid")),
    {"seq_length": 65, "transformer_impl": "local"} | PACKED,
    SHARED | {"transformer_impl": "local"},
    DEEPSEEK | SHARED | {"apply_rope_fusion": True},
    DEEPSEEK | SPREAD,
    DEEPSEEK | {"q_lora_rank": None},
    DEEPSEEK | {"mtp_num_layers": 1, "pipeline_model_parallel_size": 2},
    DEEPSEEK | {"mtp_num_layers": 1, "overlap_grad_reduce": True, "pipeline_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2, "overlap_grad_reduce": True},
    {"reuse_fp32_param": True, "ckpt_format": "torch"},
]


def said_by(rule: str, args: argparse.Namespace) -> list[str]:
    """The lines of one rule."""
    try:
        return list(RULES[rule](args, RLConfig.from_args(args)) or ())
    except ValueError as error:
        return lines_of(error)


@pytest.mark.parametrize("changes", GOOD, ids=str)
def test_accepted(build, changes):
    assert problems_of(build, changes) == []


@pytest.mark.parametrize(("rule", "changes"), ROWS, ids=lambda value: str(value)[:60])
def test_refused(build, rule, changes):
    """By this rule, and by a start, which says each line once."""
    lines = problems_of(build, changes)
    assert {*lines} & {*said_by(rule, build(changes))}, lines
    assert len(set(lines)) == len(lines)


def test_an_old_transformer_engine_has_no_attention_for_trees(build, monkeypatch):
    args, rule = build(SHARED | {"transformer_impl": "transformer_engine"}), "upstream_checks.packed_rows"
    for version, refused in (("1.13.0", 1), ("2.0.0", 0), (None, 0)):
        monkeypatch.setattr(upstream_checks, "_transformer_engine", lambda version=version: version)
        assert len(said_by(rule, args)) == refused


@pytest.mark.parametrize("rule", REFUSED)
def test_each_message_stands_in_the_page(build, tmp_path, rule):
    """In the words of refusals.txt."""
    lines = [line for changes in REFUSED[rule] for line in said_by(rule, build(changes))]
    lines = [re.sub(r"[\d.]+(?= GiB of memory)", "ALL", line) for line in lines]  # of this machine
    check_golden(rule, lines, FOLDER=tmp_path, HERE=Path.cwd())


def test_every_rule_has_rows_and_the_pages_nothing_else():
    assert {*REFUSED, *ELSEWHERE} == {*RULES}
    others = {heading for heading in sections() if not heading.startswith("episodes: ")}
    assert others == {*REFUSED, "notes", "test_early"}


def test_the_page_of_models_is_made_of_the_tables_of_checks():
    """Its marked part."""
    single = []
    for row in (row for row in UPSTREAM if row.about in (RUN, WHOLE) and row not in OWN_RL):
        fine = " or ".join(f"`{value}`" for value in row.fine if value not in OFF)
        single.append(f"`{row.spelt}`{f' but {fine}' if fine else ''}")
    families = dict((*SPECS.values(), *(row for rows in MODEL_FLAGS.values() for row in rows.values()), GPT3))
    lines = [f"Refused with every model: {', '.join(single)}.", ""]
    lines += ["| family | what RL does not know of it |", "|---|---|"]
    lines += [f"| {name} | {has} |" for name, has in families.items()]
    part = re.compile("(?<=<!-- from checks/ -->\n).*?(?=<!-- end -->)", re.DOTALL)
    if os.environ.get("GOLDEN") == "write":
        MODELS.write_text(part.sub(lambda _: "\n".join((*lines, "")), MODELS.read_text()))
    assert part.search(MODELS.read_text())[0].splitlines() == lines, "where this is meant, run this with GOLDEN=write"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "-size 2 does not divide the 3 ranks that train (3 trainers = 4 ranks - --rl-generators 1); start"),
        ({"tensor_model_parallel_size": 1}, "x 3 data-parallel ranks = 6 (3 trainers = 4 ranks - --rl-generators 1);"),
    ],
)
def test_a_number_of_trainers_that_does_not_divide_is_said_to_be_what_generators_leave(
    build, monkeypatch, changes, expected
):
    monkeypatch.setenv("MINDSPEED_RL_PART", "1")
    changes = ASYNC | {"--rl-generators": "1", "world_size": 3} | changes
    assert any(expected in line for line in problems_of(build, changes)), problems_of(build, changes)


@pytest.mark.parametrize("changes", FAMILIES, ids=lambda value: str(value)[-40:])
def test_a_family_that_is_not_built_answers_first_and_alone(build, changes):
    """Before ranks and batch, which do not divide here. DPO generates nothing, so it trains what Megatron builds."""
    assert len(problems_of(build, {**changes, "micro_batch_size": 7, "world_size": 3})) == 1
    flag_checks.check_unvalidated(build({**changes, **DPO}))


@pytest.mark.parametrize("row", UPSTREAM, ids=lambda row: row.name)
def test_upstreams_flags_one_by_one(row):
    """Each row refuses another value, by flag, value and fix, and takes its own fine ones and a Megatron without it."""
    other = next(v for v in (True, False, 7, "other") if v not in row.fine)
    shown = {True: row.spelt, False: f"without {row.spelt}"}.get(other, f"{row.spelt} {other}")
    (message,) = refusals(types.SimpleNamespace(**{row.name: other}), row.about)
    assert message == f"{shown}: {row.why}" and row.why
    assert all(row.message(types.SimpleNamespace(**{row.name: value})) is None for value in row.fine)
    assert row.message(types.SimpleNamespace()) is None


def test_lists_are_shown_as_they_were_given():
    args = types.SimpleNamespace(rampup_batch_size=["16", "8", "100"], cuda_graph_impl="local", fp8="hybrid")
    assert [m.partition(":")[0] for m in refusals(args, RUN)] == [
        *("--rampup-batch-size 16 8 100", "--cuda-graph-impl local", "--fp8-format hybrid")
    ]


def test_the_table_of_upstreams_flags_names_each_once_and_is_walked_whole(build):
    assert len({row.name for row in UPSTREAM}) == len(UPSTREAM)
    tried = {RUN: {}, WHOLE: {}, "model": {}, "experts": MOE, "latent": DEEPSEEK, ROUTING: MOE}
    for about, base in tried.items():
        row = next(row for row in UPSTREAM if row.about == about)
        lines = problems_of(build, base | {row.name: 1.5})
        assert any(f"{row.spelt} 1.5: {row.why}" in line for line in lines), (row, lines)
    assert {row.about for row in UPSTREAM} == set(tried)
    row = next(row for row in UPSTREAM if row.about == WHOLE)
    assert any(line.startswith(row.spelt) for line in problems_of(build, DPO | {row.name: True}))
    assert model_refusals(types.SimpleNamespace(moe_latent_size=1, enable_dsa_indexer=True)) == []


def test_defaults_of_megatrons_own_rl_pass_together_and_what_is_named_instead_is_ours():
    assert refusals(types.SimpleNamespace(**{row.name: row.fine[0] for row in OWN_RL}), RUN) == []
    fixes = {row.name: row.why.rpartition("; ")[2] for row in OWN_RL}
    assert fixes["grpo_group_size"] == "give --rl-samples-per-prompt instead"
    assert fixes["rl_use_sequence_packing"] == "remove it"
    assert {word for fix in fixes.values() for word in fix.split() if word.startswith("--")} <= set(flag_names())


def megatrons_parsers():
    """The installed Megatron's arguments.py, and those of the checkouts in MEGATRON_LM_PATH."""
    installed = Path(importlib.util.find_spec("megatron.core").origin).parents[1] / "training" / "arguments.py"
    return [installed, *(checkout / "megatron" / "training" / "arguments.py" for checkout in checkouts())]


def group_of(source):
    """Attribute -> default of `_add_rl_args` in this file, executed alone; nothing where it has none."""
    head, separator, tail = source.read_text().partition("def _add_rl_args(parser):")
    if not separator:
        return {}
    body = tail.partition("\ndef ")[0]
    space = {"argparse": argparse}
    exec(separator + body, space)
    parser = space["_add_rl_args"](argparse.ArgumentParser())
    return {a.dest: a.default for a in parser._actions if a.dest not in ("help", "perform_rl_step")}


def test_the_table_of_megatrons_own_rl_holds_every_argument_with_its_default():
    table = {row.name: row.fine for row in OWN_RL}
    groups = [group_of(source) for source in megatrons_parsers()]
    assert any(groups), "no Megatron here has the group"
    for group in groups:
        assert {name: default for name, default in group.items() if default not in table.get(name, ())} == {}


def limited():
    for group in dataclasses.fields(RLConfig):
        for field in dataclasses.fields(getattr(RLConfig(), group.name)):
            if field.metadata["limits"]:
                yield group.name, field


@pytest.mark.parametrize(("group", "field"), limited(), ids=lambda value: getattr(value, "name", value))
def test_numbers_of_our_flags_have_limits(group, field):
    def problems(value):
        return limit_problems(dataclasses.replace(getattr(RLConfig(), group), **{field.name: value}))

    limits = field.metadata["limits"]
    for kind, limit in limits.items():
        outside = {"least": limit - 1, "above": limit, "most": limit + 1, "below": limit}[kind]
        (line,) = problems(outside)
        assert line.startswith(f"{flag_name(field.name)} is {outside}; give a number ") and f"{limit:g}" in line
        inside = {"least": limit, "above": limit + 0.1, "most": limit, "below": limit - 0.1}[kind]
        assert problems(inside) == []
    for value in (math.nan, math.inf):
        assert len(problems(value)) == 1
    assert problems(None) == [] and problems(field.default) == []


def test_every_problem_is_reported_at_once_and_once(build):
    lines = problems_of(build, {"hidden_dropout": 0.1, "save": None, "--rl-top-p": "2", "--rl-clip-low": "-1"})
    assert len(lines) == 4
    flags = {"--rl-gamma": "0.9", "--rl-value-clip": "0.3", "--rl-critic-lr": "1e-3", "--rl-clip-low": "0.1"}
    for base in ({"--rl-loss": "sapo"}, DPO):
        assert sorted(line.split()[0] for line in problems_of(build, base | flags)) == sorted(flags)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_single_response_is_taken_only_where_none_is_compared(build, name):
    lines = problems_of(build, {"--rl-advantage": name, "--rl-samples-per-prompt": "1"})
    assert [f"the advantage {name!r} compares" in line for line in lines] == [True] * (
        name not in ("reinforce++", "gae")
    )


def test_local_attention_knows_context_parallelism_where_it_is_mindspeeds(build, monkeypatch):
    """MindSpeed's is a class of its own in the place of Megatron's."""
    name = "megatron.core.transformer.dot_product_attention"
    for where, refused in ((name, True), ("mindspeed.core.context_parallel.adaptor", False)):
        init = types.FunctionType((lambda self: None).__code__, {"__name__": where})
        module = types.ModuleType(name)
        module.DotProductAttention = type("DotProductAttention", (), {"__init__": init})
        monkeypatch.setitem(sys.modules, name, module)
        lines = problems_of(build, CP2 | {"transformer_impl": "local"})
        assert ["--transformer-impl transformer_engine" in line for line in lines] == [True] * refused


def test_fewer_groups_than_tensor_parallel_ranks_need_a_megatron_that_repeats_them(build, monkeypatch):
    fewer = {"num_query_groups": 2, "tensor_model_parallel_size": 4, "data_parallel_size": 1}
    for minor, refused in ((12, True), (16, False)):
        monkeypatch.setitem(sys.modules, "megatron.core.package_info", types.SimpleNamespace(MINOR=minor))
        lines = problems_of(build, fewer)
        assert ["--num-query-groups 2 is not a multiple of" in line for line in lines] == [True] * refused


def test_dumps_of_another_run_are_refused_before_anything_is_built(build, tmp_path):
    (tmp_path / "rollout-000000.parquet").write_bytes(b"")
    (line,) = problems_of(build, {"--rl-dump-dir": str(tmp_path), "save": str(tmp_path / "out")})
    assert line.startswith(f"--rl-dump-dir {tmp_path} holds 1 rollouts")


def test_checks_change_nothing(build):
    args = build({})
    before = dict(vars(args))
    flag_checks.check_args(args)
    flag_checks.warnings(args)
    assert vars(args) == before


COLOCATED = {"--rl-swap": "none", "--rl-reshard": "allgather", "--rl-reshard-bucket-mb": "64"}
BALANCED = {"num_experts": 8, "moe_aux_loss_coeff": [0.0, 0.01], "moe_z_loss_coeff": 1e-3}
NOTED = [
    {"--rl-top-p": "0.9", "--rl-top-k": "50", "--rl-clip-low": "1"},
    {"--rl-dock": "anything"},
    DPO | {"--rl-dock": "anything"},
    {"no_save_optim": True, "no_save_rng": True},
    {"--rl-schedule": "async", **COLOCATED},
    {"swap_optimizer": True},
    SHARED,
    BALANCED,
    BALANCED | {"moe_router_load_balancing_type": ["none"]},
    CP2 | LATENT | {"shape_order": "SBH"},
    AGENT | CARRY | {"--rl-agent": "bash", "--rl-environment-lockstep": ""},
]
QUIET = [
    {},
    {"--rl-clip-low": "0.9"},
    {"--rl-schedule": "async"},
    COLOCATED,
    SHARED | PACKED,
    {"swap_optimizer": True, "--rl-swap": "params,grads"},
    {"num_experts": 8, "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None},
]


def test_what_works_but_should_be_known_is_noted(build):
    said = [flag_checks.warnings(build(changes)) for changes in NOTED]
    assert all(said) and not any(flag_checks.warnings(build(changes)) for changes in QUIET)
    check_golden("notes", [line for lines in said for line in lines])


def test_two_tokenizers_of_one_size_are_noted(build, tmp_path):
    for name, vocab in (("tokenizer", '{"a": 0, "b": 1}'), ("same", '{"a": 0, "b": 1}'), ("other", '{"b": 0, "a": 1}')):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "tokenizer.json").write_text(f'{{"model": {{"vocab": {vocab}}}}}')
    assert flag_checks.warnings(build({"tokenizer_model": str(tmp_path / "same")})) == []
    assert flag_checks.warnings(build({"tokenizer_model": "a sentencepiece file"})) == []
    for given, flag in (("tokenizer_model", "--tokenizer-model"), ("--rl-hf-model", "--rl-hf-model")):
        (line,) = flag_checks.warnings(build({given: str(tmp_path / "other")}))
        assert f"{tmp_path / 'tokenizer'} and {flag} {tmp_path / 'other'} have different" in line


def test_an_environment_that_vllm_cannot_use_is_refused_before_anything_is_read(build, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(ValueError, match="VLLM_ENABLE_V1_MULTIPROCESSING=1"):
        read_inputs(build({}))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setattr(engine_env, "vllm_version", lambda: (0, 15))
    with pytest.raises(ValueError, match=r"vLLM 0\.15 does not tell which experts"):
        read_inputs(build(REPLAY | MOE))


@pytest.mark.parametrize("folder, refused", [("ops/fused_moe", True), ("ops/moe", False)])
def test_an_engine_that_ranks_groups_of_experts_otherwise_is_refused(build, monkeypatch, folder, refused):
    files = [Path("vllm_ascend", folder, "experts_selector.py")]
    monkeypatch.setattr("importlib.metadata.files", lambda name: files if name == "vllm-ascend" else None)
    args = build(LIMITED)
    sizes = dict(world=8, max_positions=64, itemsize=2)
    shape, config = ModelShape.from_megatron_args(args, 100), RLConfig.from_args(args)
    lines = [*engine_problems(shape, config, kind="npu", **sizes)]
    assert [line for line in lines if "group_limited_greedy on NPUs" in line] == lines and bool(lines) == refused
    assert not [*engine_problems(shape, config, kind="cuda", **sizes)]
