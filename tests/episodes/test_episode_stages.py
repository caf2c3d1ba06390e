"""What stages make of episodes: grades, rewards of turns, the gate for rows from outside, metrics, refusals."""

import copy
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from stage_context import context_of, episodes

from mindspeed_rl_plugin.algorithms import RewardBatch, resolve
from mindspeed_rl_plugin.algorithms.estimators import gae, reinforce_plus_plus
from mindspeed_rl_plugin.checks.episode_checks import notes
from mindspeed_rl_plugin.config import AlgorithmConfig, RLConfig
from mindspeed_rl_plugin.config.episode_flags import EpisodeConfig
from mindspeed_rl_plugin.dock import VersionBound
from mindspeed_rl_plugin.episodes.environments import EpisodeError
from mindspeed_rl_plugin.episodes.episode_rows import EPISODE_COUNTS, FAILING, EpisodeMeter, episode_row
from mindspeed_rl_plugin.reward import RewardPool
from mindspeed_rl_plugin.rows import (
    Completion,
    GenerateRequest,
    Ragged,
    Rows,
    SampleId,
    Sampling,
    pack_json,
)
from mindspeed_rl_plugin.stages import advantages, generate, measure, reward
from mindspeed_rl_plugin.stages.response_validator import ResponseValidator

KIND = episodes()
COUNTS = dict.fromkeys(EPISODE_COUNTS, 0)


def episode_rows(
    *episodes: tuple[list[tuple[int, int]], list[float]], tools=((0, 0),), failed=None, data=(1, 2), **counts
) -> Rows:
    """Rows of `generate` from turns, in response tokens, and their rewards; the prompt has two tokens. data: the data's
    own prompt."""
    requests, completions = [], []
    for member, (turns, rewards) in enumerate(episodes):
        sample, length = SampleId(0, member // 2, member % 2), turns[-1][1]
        requests.append(GenerateRequest(sample, data, Sampling(40), 0))
        sampled = {place for first, end in turns for place in range(first, end)}
        logps = tuple(-0.5 if place in sampled else 0.0 for place in range(length))
        said = [{"role": "assistant", "content": "x"}]
        told = {"counts": COUNTS | counts, "tools": tools, "failed": failed is not None}
        columns = episode_row((1, 2), data, turns, rewards, said, **told)
        tokens, more = tuple(range(3, 3 + length)), {"prompt": (1, 2), "turns": tuple(turns), "columns": columns}
        completions.append(Completion(sample, tokens, logps, "stop", ((0, 4),), **more))
    return generate.completion_rows(requests, completions)


TWO = ([(0, 2), (5, 7)], [0.25, 1.0])
ONE = ([(0, 3)], [0.5])


def test_columns_of_episodes() -> None:
    rows = episode_rows(TWO, ONE)
    assert rows["loss_mask"].row(0).tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 1]
    assert rows["logp_rollout"].row(0).tolist() == [0, 0, -0.5, -0.5, 0, 0, 0, -0.5, -0.5]
    assert rows["response_length"].tolist() == [4, 3] and rows["length"].tolist() == [9, 5]
    assert rows["turns"].row(0).tolist() == [[2, 4], [7, 9]] and rows["prompt_length"].tolist() == [2, 2]
    assert rows["environment_began"].tolist() == [0, 0]
    assert {c.name for c in generate.spec(KIND).writes} == set(rows.columns)


def test_graders_see_the_last_turn_and_all_that_was_said() -> None:
    meta = {"text": "p", "answer": "7 8", "record": {}, "messages": None, "row": 0}
    rows = episode_rows(TWO, ONE).with_columns(meta=pack_json([meta] * 2))
    stage = reward.Reward(reward.spec(2), context_of(decode=lambda ids: " ".join(map(str, ids))))
    items = stage.items(rows)
    assert [item.response for item in items] == ["8 9", "3 4 5"] and [item.environment for item in items] == [1.25, 0.5]
    assert items[0].conversation == [{"role": "assistant", "content": "x"}]
    with closing(RewardPool(["environment", "exact=2"], regex=None, workers=1)) as pool:
        assert pool.grade([replace(items[0], answer="8 9")])[0].total == 3.25


def test_a_failed_environment_drops_the_sample_where_it_is_asked_to() -> None:
    rows, grades = episode_rows(TWO, ONE, failed="raised"), [SimpleNamespace(total=1.0, parts=(1.0,), dropped=False)]
    for grade in grades:
        grade.error = None
    for on_error in ("drop", "stop"):
        stage = reward.Reward(reward.spec(1), context_of(responses=episodes(environment_on_error=on_error)))
        assert stage.grades(rows, grades * 2)["graded"].tolist() == [int(on_error != "drop")] * 2


def reference(rows: Rows, total: torch.Tensor, weight: float, gamma: float) -> list[list[float]]:
    """Discounted sums over trained tokens, in float64: turns' rewards where they came, the rest at the end."""
    out = []
    for row in range(len(rows)):
        mask, turns = rows["loss_mask"].row(row), rows["turns"].row(row)
        at, own = torch.zeros(len(mask), dtype=torch.float64), rows["turn_reward"].row(row).double() * weight
        for (_, end), value in zip(turns.tolist(), own.tolist(), strict=True):
            at[end - 1] += value
        at[int(mask.nonzero().max())] += float(total[row].double() - own.sum())
        value, values = 0.0, [0.0] * len(mask)
        for token in reversed(mask.nonzero().flatten().tolist()):
            value = values[token] = float(at[token]) + gamma * value
        out.append(values)
    return out


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_turn_rewards_stand_where_the_turn_ends(weight: float) -> None:
    algorithm = resolve(AlgorithmConfig(algorithm="reinforce++", gamma=0.9))
    assert {"turns", "turn_reward"} <= {*advantages.spec(algorithm, KIND).if_written}
    assert "turns" not in advantages.spec(resolve(AlgorithmConfig(algorithm="grpo")), KIND).if_written
    total, rows = torch.tensor([2.0, -1.0]), episode_rows(TWO, ONE)
    spread = advantages._turn_rewards(rows, weight)
    batch = RewardBatch(total, torch.tensor([0, 1]), rows["loss_mask"], turn_rewards=spread)
    got = reinforce_plus_plus(batch, algorithm)
    for row, wanted in enumerate(reference(rows, total, weight, 0.9)):
        assert got.row(row).tolist() == pytest.approx(wanted, abs=1e-12)
    assert float(batch.token_rewards().values.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["dr-grpo", "reinforce++"])
def test_the_penalty_on_length_counts_what_the_limit_counts(name: str) -> None:
    """Seven tokens, of which four are trained, at a limit of seven; and three."""
    plain = AlgorithmConfig(algorithm=name, kl_reward_coef=0.0, gamma=1.0)
    algorithm = resolve(replace(plain, overlong_buffer=4, overlong_penalty=2.0))
    rows = episode_rows(TWO, ONE).with_columns(reward=torch.zeros(2), valid=torch.ones(2, dtype=torch.int8))
    spec, tallies = advantages.spec(algorithm, KIND), measure.spec(algorithm, kind=KIND)
    assert not {"length", "prompt_length"} & {*advantages.spec(resolve(plain), KIND).reads}
    read = Rows(rows.ids, {name: rows[name] for name in spec.reads})
    values, _ = advantages._estimated(read, algorithm, 7, 0.0)
    if algorithm.per_token:
        assert {*values[read["loss_mask"].values.bool()].tolist()} == {-2.0, 0.0}
    else:
        assert values.tolist() == [-1.0, 1.0]
    assert "prompt_length" in tallies.if_written and len({*tallies.reads}) == len(tallies.reads)
    stage = measure.Measure(tallies, context_of(algorithm=algorithm, longest=7))
    assert stage._overlong(rows) == {"reward/overlong": -1.0, "response/overlong": 0.5}


def test_gae_carries_values_over_what_is_only_seen() -> None:
    """The episode without its holes has the same advantages."""
    algorithm = resolve(AlgorithmConfig(algorithm="ppo", gamma=0.9, gae_lambda=0.8))
    rows = episode_rows(TWO)
    mask, spread = rows["loss_mask"], advantages._turn_rewards(rows, 1.0)
    values = Ragged(torch.randn(len(mask.values), generator=torch.Generator().manual_seed(0)), mask.offsets)
    batch = RewardBatch(torch.tensor([2.0]), torch.tensor([0]), mask, None, values, spread)
    trained = mask.values.bool()
    short = Ragged(mask.values[trained], torch.tensor([0, 4]))
    held = (Ragged(column.values[trained], short.offsets) for column in (values, spread))
    dense = RewardBatch(torch.tensor([2.0]), torch.tensor([0]), short, None, *held)
    got, wanted = gae(batch, algorithm), gae(dense, algorithm)
    assert got.values[trained].tolist() == wanted.values.tolist() and not got.values[~trained].any()


def outside(rows: Rows) -> Rows:
    """As they come to the gate."""
    prompt = Ragged.from_rows([torch.tensor([1, 2], dtype=torch.int32)] * len(rows))
    return rows.with_columns(prompt=prompt)


def changed(rows: Rows, name: str, value) -> Rows:
    column = rows[name]
    if isinstance(column, Ragged):
        return rows.with_columns(**{name: Ragged.from_rows([torch.tensor(value, dtype=column.values.dtype)])})
    return rows.with_columns(**{name: torch.tensor([value], dtype=column.dtype)})


NO_CONVERSATIONS = ("", "[" * 100_000, "{}", "[]", '["said"]', '[{"role": "user"}]', '[{"content": "said"}]')
WRONG = [
    ("turns", [[2, 4], [3, 9]], r"turns \[\[2, 4\], \[3, 9\]\]"),
    ("turns", [[3, 4], [7, 9]], "the first begins at the prompt's end"),
    ("turns", [[2, 4], [7, 7]], "none empty"),
    ("loss_mask", [0, 0, 1, 1, 1, 0, 0, 1, 1], "token 4: loss_mask is 1; give 1 on what the model sampled"),
    ("logp_rollout", [0, 0, -1, -1, -1, 0, 0, -1, -1.0], "token 4: logp_rollout is -1"),
    ("response_length", 7, "response_length is 7, not 4"),
    ("finish", 2, "finish is 2"),
    ("prompt_length", 0, "prompt_length is 0"),
    ("prompt_length", 3, "prompt_length is 3, but the prompt has 2 tokens"),
    ("prompt", [1, 9], "token 1: 2, but the prompt has 9 there; begin with the prompt"),
    ("environment_began", 2, "environment_began is 2; give 0 or 1"),
    ("environment_failed", -1, "environment_failed is -1; give 0 or 1"),
    ("turn_reward", [0.5], "turn_reward has 1 entries for 2 turns; give one for each"),
    ("turn_reward", [0.5, float("nan")], "turn 1: turn_reward is nan; give a finite number"),
    ("episode_counts", [-1] * len(EPISODE_COUNTS), r"episode_counts \[-1, .* at least 0"),
    ("tool_calls", [[1, 2]], r"tool_calls \[\[1, 2\]\]; give \[made, raised\]"),
    *(("conversation", [*text.encode()], "give a JSON list of messages") for text in NO_CONVERSATIONS),
]


@pytest.fixture
def gate() -> ResponseValidator:
    made = ResponseValidator(99, 12, KIND)
    made.published.add(4)
    return made


def test_the_gate_takes_episodes_that_are_right(gate: ResponseValidator) -> None:
    gate.check(outside(episode_rows(TWO, ONE)), VersionBound(0))
    gate.check(changed(outside(episode_rows(TWO)), "finish", 3), VersionBound(0))


@pytest.mark.parametrize("data", [(1,), (1, 9), (1, 9, 3)])
def test_the_gate_takes_a_prompt_that_an_environment_changed(gate: ResponseValidator, data: tuple[int, ...]) -> None:
    """Longer than the data's, or as long: what it says may merge with the last token of the prompt."""
    rows = outside(episode_rows(TWO, data=data))
    assert rows["environment_began"].tolist() == [1]
    gate.check(rows.with_columns(prompt=Ragged.from_rows([torch.tensor(data, dtype=torch.int32)])), VersionBound(0))


def test_rewards_of_one_row_never_come_to_another(gate: ResponseValidator) -> None:
    rewards = Ragged.from_rows([torch.tensor([1.0]), torch.tensor([0.5, 7.0])])
    with pytest.raises(ValueError, match=r"row \(0, 0, 0\): turn_reward has 1 entries for 2 turns"):
        gate.check(outside(episode_rows(TWO, ONE)).with_columns(turn_reward=rewards), VersionBound(0))


@pytest.mark.parametrize(("name", "value", "message"), WRONG, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(WRONG)])
def test_the_gate_refuses_episodes_that_are_none(gate: ResponseValidator, name: str, value, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gate.check(changed(outside(episode_rows(TWO)), name, value), VersionBound(0))


def test_metrics_and_environments_that_never_work() -> None:
    rows = episode_rows(TWO, ONE, tools=((3, 1), (2, 2)), calls=5, cut=1, milliseconds=500, observation_tokens=3)
    got = EpisodeMeter(())(rows)
    assert got["episode/turns_mean"] == 1.5 and got["episode/turns_max"] == 2 and got["tools/calls"] == 5
    assert got["episode/seconds"] == 0.5 and got["episode/cut"] == 2 and got["episode/failed"] == 0
    one, all_of_them = (torch.tensor([1, number], dtype=torch.int8) for number in (0, 1))
    assert EpisodeMeter(())(rows.with_columns(environment_failed=one))["episode/failed"] == 1
    with pytest.raises(EpisodeError, match="failed in all 2 episodes"):
        EpisodeMeter(())(rows.with_columns(environment_failed=all_of_them))


def test_tools_that_never_work(capsys) -> None:
    def tell(meter: EpisodeMeter, a: tuple[int, int], b: tuple[int, int], *turns) -> EpisodeMeter:
        meter(episode_rows(*(turns or (TWO,)), tools=(a, b), calls=a[0] + b[0]))
        return meter

    meter = EpisodeMeter(["a", "b"])
    for _ in range(FAILING // 2 - 1):  # each of the two episodes calls it twice
        tell(meter, (3, 1), (2, 2), TWO, ONE)
    assert meter.failing == {"a": 0, "b": FAILING - 2}
    assert tell(meter, (3, 1), (0, 0)).failing["b"] == FAILING - 2, "not called"
    assert tell(copy.deepcopy(meter), (0, 0), (2, 1)).failing["b"] == 0, "one of its calls was answered"
    with pytest.raises(EpisodeError, match="'b' raised in every call of the last 16 episodes"):
        tell(meter, (3, 1), (2, 2), TWO, ONE)
    assert "called no tool" not in capsys.readouterr().out
    silent = EpisodeMeter(["a", "b"])
    for _ in range(2):
        tell(silent, (0, 0), (0, 0))
    assert capsys.readouterr().out.count("the model called no tool in any of the 1 episodes") == 1


@pytest.mark.parametrize(
    ("graders", "environment", "said"),
    [
        (("exact",), "a.py:A", "so the environment's reward trains nothing; add environment"),
        (("exact", "b.py:f=0.5"), "a.py:A", "nothing, unless a function of yours reads `environment`; add"),
        (("exact", "environment=0"), "a.py:A", None),
        (("exact",), None, None),
        ((), "a.py:A", None),
    ],
)
def test_rewards_of_an_environment_that_no_grader_reads_are_told_of(graders, environment, said) -> None:
    config = RLConfig(episodes=EpisodeConfig(environment=environment))
    config = replace(config, reward=replace(config.reward, reward=graders))
    assert config.graders == (graders or ("environment",))
    lines = [*notes(config)]
    assert len(lines) == (said is not None) and all(said in line for line in lines), lines
