"""Evaluation: pass@k against enumeration, replicas that add up to one, greedy and sampled requests."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from stage_context import context_of

from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.config.run_flags import MonitorConfig
from mindspeed_rl_plugin.reward import Grade
from mindspeed_rl_plugin.rows import Prompt, Sampling, unpack_json
from mindspeed_rl_plugin.stages.evaluate import SUMS, Evaluate, eval_metrics, pass_at_k, sums_of


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations(range(n), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(min(s) < c for s in subsets) / len(subsets))


def test_what_has_no_value_is_refused() -> None:
    for n, c, k in ((3, 1, 4), (3, 4, 1), (0, 0, 1), (3, 1, 0)):
        with pytest.raises(ValueError, match="1 <= k <= n"):
            pass_at_k(n, c, k)
    with pytest.raises(ValueError, match="no prompts"):
        eval_metrics(torch.zeros(len(SUMS)), 1)


def prompts(count: int) -> list[Prompt]:
    return [Prompt((5, 1 + i % 3), f"prompt {i}", str(i), i) for i in range(count)]


def run(engine, count: int, samples: int):
    """The response of prompt i is right in attempts i, i + 1, ... so that every prompt counts differently."""
    grade = lambda group, member: Grade(0.5 * group, (float(member >= group),))  # noqa: E731
    graders = SimpleNamespace(weights=(1.0,), grade=lambda items: [grade(*item.id[1:]) for item in items])
    sampling = Sampling(max_tokens=4, temperature=0.7, top_p=0.9, top_k=5, stop_token_ids=(2,))
    config = RLConfig(monitor=MonitorConfig(eval_pass_k=samples))
    given = {"engine": engine, "graders": graders, "sampling": sampling, "seed": 1, "config": config, "decode": str}
    stage = Evaluate(context_of(**given), prompts(count))
    rows = stage._rows()
    scored, _ = stage._score(rows) if len(rows) else ([], [])
    if len(rows):
        assert [meta["row"] for meta in unpack_json(rows["meta"])] == [sample.group for sample in rows.ids]
    return torch.tensor(sums_of(scored, samples), dtype=torch.float64)


def test_metrics(fake_engine) -> None:
    # Sampled attempts 1..3 are right from attempt i on: 3, 3, 2 and 1 of them.
    expected = {
        "eval/accuracy": 1 / 4,
        "eval/reward_mean": (0 + 0.5 + 1 + 1.5) / 4,
        "eval/response_length": (1 + 2 + 3 + 1) / 4,
        "eval/truncated": 1 / 4,
        "eval/pass@1": (3 + 3 + 2 + 1) / 3 / 4,
        "eval/pass@3": 1.0,
    }
    assert eval_metrics(run(fake_engine(), 4, samples=3), 3) == pytest.approx(expected)


def test_replicas_add_up(fake_engine) -> None:
    parts = [run(fake_engine(replica=r, replicas=3), 7, samples=2) for r in range(3)]
    assert sum(parts).tolist() == pytest.approx(run(fake_engine(), 7, samples=2).tolist())


def test_only_the_leader_scores(fake_engine) -> None:
    assert not run(fake_engine(leader=False), 3, samples=0).any()


def test_attempt_0_is_greedy_and_the_others_are_not() -> None:
    seen = []

    def stop(requests):
        seen.extend(requests)
        raise InterruptedError

    with pytest.raises(InterruptedError):
        run(SimpleNamespace(submit=stop, replica=0, replicas=1, leader=True), 1, samples=2)
    greedy, *sampled = [r.sampling for r in seen]
    assert (greedy.temperature, greedy.top_p, greedy.top_k, greedy.stop_token_ids) == (0.0, 1.0, 0, (2,))
    assert [(s.temperature, s.top_p, s.top_k) for s in sampled] == [(0.7, 0.9, 5)] * 2
    assert len({r.seed for r in seen}) == 3
