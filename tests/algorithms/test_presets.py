"""Presets as rows, how flags override them, what is refused, and the command that prints it all."""

import dataclasses
import math
import re

import pytest

from mindspeed_rl_plugin.algorithms import ALGORITHMS, LOSSES, resolve
from mindspeed_rl_plugin.algorithms.aggregate import AGGREGATIONS
from mindspeed_rl_plugin.algorithms.corrections import CORRECTION_LEVELS, CORRECTIONS
from mindspeed_rl_plugin.algorithms.describe import describe
from mindspeed_rl_plugin.algorithms.estimators import ADVANTAGES
from mindspeed_rl_plugin.algorithms.kl import KL_ESTIMATORS
from mindspeed_rl_plugin.algorithms.pair_losses import PAIR_LOSSES
from mindspeed_rl_plugin.algorithms.selection import FILTRATIONS
from mindspeed_rl_plugin.config import AlgorithmConfig, flag_name
from mindspeed_rl_plugin.tools import algorithms as command

# preset -> advantage, loss, low, high, aggregation, KL in the loss, KL in the reward
ROWS = {
    "ppo": ("gae", "clip", 0.2, 0.2, "token-mean", 0.0, 0.001),
    "grpo": ("group-norm", "clip", 0.2, 0.2, "seq-mean-token-mean", 0.001, 0.0),
    "dapo": ("group-norm", "clip-higher", 0.2, 0.28, "token-mean", 0.0, 0.0),
    "pf-ppo": ("gae", "clip", 0.2, 0.2, "token-mean", 0.0, 0.001),
    "dr-grpo": ("group-mean", "clip", 0.2, 0.2, "token-sum-norm", 0.0, 0.0),
    "rloo": ("rloo", "reinforce", 0.0, 0.0, "seq-mean-token-sum", 0.0, 0.05),
    "reinforce++": ("reinforce++", "clip", 0.2, 0.2, "token-mean", 0.0, 0.01),
    "gspo": ("group-norm", "gspo", 3e-4, 4e-4, "seq-mean-token-mean", 0.0, 0.0),
    "cispo": ("group-norm", "cispo", 10.0, 0.2, "token-mean", 0.0, 0.0),
    "dpo": ("pairs", "dpo", 0.0, 0.0, "pairs", 0.0, 0.0),
}


def chosen(**flags):
    return resolve(AlgorithmConfig(**{"algorithm": "grpo", **flags}))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_rows(name):
    algorithm = chosen(algorithm=name)
    bounds = algorithm.bounds
    assert ROWS[name] == (
        *(algorithm.advantage, algorithm.loss, bounds.low, bounds.high, algorithm.aggregation),
        *(algorithm.kl_loss_coef, algorithm.kl_reward_coef),
    )
    assert algorithm.needs_reference == (name in ("ppo", "grpo", "pf-ppo", "rloo", "reinforce++", "dpo"))
    assert algorithm.correction == "off" and algorithm.bounds.dual is None and algorithm.kl_estimator == "k3"
    assert algorithm.dynamic_sampling == (name == "dapo")
    assert algorithm.filtration == ("best-worst" if name == "pf-ppo" else "none")


def test_explicit_flags_win():
    flags = {"loss": "clip-higher", "aggregation": "token-mean", "clip_low": 0.1, "kl_estimator": "k1"}
    algorithm = chosen(**flags, kl_loss_coef=0.0)
    assert (algorithm.bounds.low, algorithm.bounds.high, algorithm.aggregation) == (0.1, 0.28, "token-mean")
    assert algorithm.kl_estimator == "k1" and not algorithm.needs_reference
    assert chosen(kl_reward_coef=0.1).needs_reference
    assert chosen(algorithm="ppo", advantage="reinforce++").needs_critic is False
    assert chosen(algorithm="dapo", dynamic_sampling=False).dynamic_sampling is False
    assert chosen(algorithm="pf-ppo", advantage="group-mean", filtration="none").filtration == "none"
    sapo = chosen(loss="sapo", sapo_tau_negative=2.0).bounds
    assert (sapo.tau_positive, sapo.tau_negative) == (1.0, 2.0)


def test_the_buffer_follows_the_response_limit_unless_given():
    assert chosen(algorithm="dapo").buffer(20480) == 4096
    assert chosen(algorithm="dapo").buffer(2) == 1
    assert chosen(algorithm="dapo", overlong_buffer=10).buffer(100) == 10
    assert chosen(algorithm="dapo", overlong_buffer=0).buffer(100) == 0
    assert chosen().buffer(100) == 0 and chosen(overlong_buffer=10).buffer(100) == 10


def test_the_choices_of_the_flags_are_the_parts_that_there_are():
    tables = {"advantage": ADVANTAGES, "loss": LOSSES, "aggregation": AGGREGATIONS, "dpo_loss": PAIR_LOSSES}
    tables |= {"kl_estimator": KL_ESTIMATORS, "kl_reward_estimator": KL_ESTIMATORS, "correction": CORRECTIONS}
    tables |= {"filtration": ("none", *FILTRATIONS), "correction_level": CORRECTION_LEVELS}
    given = {f.name: f.metadata["choices"] for f in dataclasses.fields(AlgorithmConfig) if f.metadata["choices"]}
    assert given == {name: tuple(table) for name, table in tables.items()}
    for name, choices in (given | {"algorithm": ALGORITHMS}).items():
        with pytest.raises(
            ValueError, match=re.escape(f"{flag_name(name)} 'other' is unknown; known: {', '.join(choices)}")
        ):
            chosen(**{name: "other"})


@pytest.mark.parametrize(
    "flags",
    [
        {"clip_low": -0.1},
        {"kl_loss_coef": math.inf},
        {"kl_reward_coef": math.nan},
        {"dpo_label_smoothing": 0.1, "dpo_loss": "ipo"},
        {"correction": "mask", "correction_low": 3.0},
        {"correction": "decoupled-clip", "correction_high": 0.9},
        {"correction": "mask", "correction_level": "geometric", "correction_low": 1.0005},
        {"correction": "truncate", "correction_low": -0.1},
        {"correction": "decoupled", "correction_high": math.nan},
    ],
)
def test_bad_settings_are_refused_by_the_name_of_the_flag(flags):
    names = [name for name in flags if name not in ("correction", "correction_level")]
    with pytest.raises(ValueError, match=f"{flag_name(names[0])} .*"):
        chosen(**flags)


def test_the_command_prints_every_preset_and_part_with_its_source_and_the_legend(capsys):
    assert command.main([]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100, "fits a terminal"
    rest = printed.partition("preset ")[2]
    table = {name: rest[rest.index(f"\n{name} ") :].split("\n\n")[0].split("\n    arXiv")[0] for name in ROWS}
    for name, row in ROWS.items():
        assert all(word in table[name] for word in (row[0], row[1], row[4]))
    assert "0.05 x k1" in table["rloo"] and "-0.2/+0.28" in table["dapo"] and "dynamic sampling" in table["dapo"]
    flat = " ".join(printed.split())
    assert all(ALGORITHMS[name].source in flat for name in ROWS) and all(f"  {name}" in printed for name in LOSSES)
    for title, functions in command.parts():
        assert title in printed
        for name, (function, _) in functions.items():
            what, source = command.described(function)
            assert what and source and f"{what} {source}" in flat, name
    formulas, _, legend = printed.partition("\nlegend\n")
    for symbol in ("[T]", "[P]", "R", "mean_g", "N", "rho_t", "V_t", "A", "r", "sg", "x", "w", "h", "ls", "c", "v_old"):
        assert re.search(rf"(?<!\w){re.escape(symbol)}(?!\w)", formulas), symbol
        assert re.search(rf"(?<!\w){re.escape(symbol)}(?!\w)[^.]*:", legend), symbol
    assert "x: logp_ref - logp, so k1 is logp - logp_ref" in legend
    assert "constant length: --rl-max-response-length" in legend


def test_a_run_says_what_flags_and_preset_make_together():
    flags = {"advantage": "rloo", "kl_loss_coef": 0.01, "clip_high": 0.3, "correction": "mask", "overlong_buffer": 7}
    assert describe(resolve(AlgorithmConfig(algorithm="grpo", **flags))) == (
        "grpo: advantage rloo, loss clip -0.2/+0.3, aggregation seq-mean-token-mean, KL in the loss 0.01 x k3, "
        "in the reward -, correction mask by token, 0.5 to 2, overlong penalty, buffer 7 tokens"
    )
    assert describe(resolve(AlgorithmConfig(algorithm="dpo"))) == "dpo: sigmoid, beta 0.1"
    assert "buffer 20% of the limit, dynamic sampling" in describe(resolve(AlgorithmConfig(algorithm="dapo")))
