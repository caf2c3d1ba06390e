"""Preference pairs: every form of data, the errors a user can cause, rows, who scores what, the cache."""

import json

import pytest
import torch
from small_tokenizers import EOS, make
from stage_context import context_of

from mindspeed_rl_plugin.forward import ForwardSettings, plan_batches
from mindspeed_rl_plugin.loop.arithmetic import derive_pairs
from mindspeed_rl_plugin.prompts import PairRenderer, PairStream
from mindspeed_rl_plugin.stages import pairs as stage
from mindspeed_rl_plugin.stages.pairs import SPEC, Pairs, pair_rows

TOKENIZER = make("words")
GOOD = {"prompt": "2*2=", "chosen": "4", "rejected": "5!"}


@pytest.fixture
def stream(tmp_path):
    def made(*rows, **changes):
        path = tmp_path / "pairs.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        keys = {name: changes.pop(f"{name}_key", name) for name in ("prompt", "chosen", "rejected")}
        renderer = PairRenderer(TOKENIZER, keys.pop("prompt"), keys, changes.pop("chat_template", False))
        return PairStream([str(path)], renderer, **{"max_length": 16, "max_response": 16, "seed": 0, **changes})

    return made


def test_names_with_dots_are_inside_objects(stream):
    row = {"question": {"text": "2*2="}, "answers": {"good": "4", "bad": "5!"}}
    keys = {"prompt_key": "question.text", "chosen_key": "answers.good", "rejected_key": "answers.bad"}
    (pair,) = stream(row, **keys).all()
    said = [TOKENIZER.decode(tokens) for tokens in (pair.prompt, pair.chosen, pair.rejected)]
    assert said == ["2*2=", f"4{EOS}", f"5!{EOS}"]


def test_a_template_that_writes_another_prompt_behind_it_is_refused(stream, monkeypatch):
    monkeypatch.setattr(TOKENIZER, "chat_template", "{{ messages | length }}")
    with pytest.raises(ValueError, match="line 1: .* when '4' follows it"):
        stream(GOOD, chat_template=True)


def test_what_is_too_long_or_teaches_nothing_is_left_out_and_counted(stream):
    same = {**GOOD, "rejected": "4"}
    pairs = stream(GOOD, same, {**GOOD, "prompt": "1" * 17}, {**GOOD, "rejected": "1" * 16}, {**GOOD, "chosen": "4."})
    assert len(pairs) == 2 and pairs.dropped == 3 and pairs.rows == [0, 4] and pairs.at(1).row == 4
    with pytest.raises(ValueError, match="all 2 pairs are left out: 1 have equal answers"):
        stream(same, {**GOOD, "prompt": "1" * 17})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1", "chosen": "2"}, "'rejected' of the rejected answer is empty"),
        ({**GOOD, "rejected": None}, "--rl-rejected-key, or correct or remove the row"),
        ({**GOOD, "chosen": 4}, "assistant message, but '4'"),
        ({**GOOD, "chosen": [{"role": "assistant", "content": "4"}]}, "holds a chat message; add --rl-apply-chat"),
        ({"question": "1", "chosen": "2", "rejected": "3"}, "'prompt' .--rl-prom"),
        ({"chosen": [{"role": "user", "content": "1"}], "rejected": [{}]}, "TRL's implicit form"),
        ({"chosen": "2"}, "set --rl-prompt-key"),
    ],
)
def test_rows_that_are_no_pairs_are_named_by_line(stream, row, message):
    with pytest.raises(ValueError, match=f"(?s)^(?=.*pairs.jsonl line 2).*{message}"):
        stream(GOOD, row)


def some_pairs(stream, count):
    return stream(*({**GOOD, "prompt": str(n), "chosen": "1" * (n % 5 + 1)} for n in range(count))).all()


def test_pairs_are_rows_beside_each_other_and_never_cut(stream):
    pairs = some_pairs(stream, 12)
    scores = torch.arange(24.0).view(12, 2)
    rows = pair_rows(pairs, scores)
    (step,) = plan_batches(rows.ids, global_batch_size=24, micro_batch_size=4, dp_size=3)
    ranks = [[rows.select(ids) for ids in step.of_rank(rank)] for rank in range(3)]
    seen = []
    for batches in ranks:
        assert [len(b) for b in batches] == [4, 4]
        for batch in batches:
            assert [i.member for i in batch.ids] == [0, 1, 0, 1]
            for k, sample in enumerate(batch.ids):
                pair = pairs[sample.group]
                answer = pair.rejected if sample.member else pair.chosen
                tokens, mask = batch["tokens"].row(k), batch["loss_mask"].row(k).bool()
                assert tuple(tokens.tolist()) == (*pair.prompt, *answer) and tuple(tokens[mask].tolist()) == answer
                assert float(batch["reference"][k]) == float(scores[sample.group, sample.member])
                seen.append(sample)
    assert sorted(seen) == sorted(rows.ids)


def test_log_probs_of_the_reference_are_those_of_the_pair_where_rows_before_it_were_left_out(stream):
    """By the place among the pairs, held-out ones behind them, which is not the row of the data."""
    same = {**GOOD, "rejected": "4"}
    data, held_out = stream(same, *({**GOOD, "prompt": str(n)} for n in range(3)), same, GOOD), stream(same, GOOD)
    where = {"dp_rank": 0, "dp_size": 1, "writer": True}
    scorer = stage.PairScorer([], [data, held_out], ForwardSettings(2, 8, 10), None, None, **where)
    scores = torch.arange(2.0 * len(scorer)).view(-1, 2)
    rows = Pairs(SPEC, context_of(data=data, pair_references=scores)).compute(0, len(data))
    texts = (tuple(row.tolist()) for row in rows["tokens"].rows())
    answers = dict(zip(texts, rows["reference"].tolist(), strict=True))
    pairs = [scorer.pair(place) for place in range(len(scorer))]
    assert [pair.row for pair in pairs] == [1, 2, 3, 5, 1]
    for pair, (chosen, rejected) in zip(pairs[:-1], scores.tolist(), strict=False):
        assert answers[pair.prompt + pair.chosen] == chosen and answers[pair.prompt + pair.rejected] == rejected


@pytest.mark.parametrize("count", [1, 3, 16, 17])
@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_every_pair_is_scored_and_every_rank_runs_equally_long(count, dp_size):
    shares = [stage.share_of_rank(count, 2, rank, dp_size) for rank in range(dp_size)]
    assert {len(share) for share in shares} == {len(shares[0])} and all(len(b) == 2 for s in shares for b in s)
    assert {i for share in shares for batch in share for i in batch} == set(range(count))


def test_the_cache_is_of_weights_and_pairs_and_a_damaged_one_is_named(tmp_path):
    settings = ForwardSettings(2, 8, 10)
    key = stage.cache_key("w", "p", settings, torch.float32)
    others = [("x", "p", settings, torch.float32), ("w", "q", settings, torch.float32)]
    others.append(("w", "p", ForwardSettings(2, 8, 10, temperature=0.5), torch.float32))
    others.append(("w", "p", settings, torch.bfloat16))
    assert len({key, *(stage.cache_key(*other) for other in others)}) == 5
    assert stage.cache_key("w", "p", ForwardSettings(4, 16, 10), torch.float32) == key, "batching is no part of it"
    assert stage.read_cache(str(tmp_path), key, 3) is None
    logps = torch.randn(3, 2, dtype=torch.float64)
    path = stage.write_cache(str(tmp_path), key, logps)
    assert torch.equal(stage.read_cache(str(tmp_path), key, 3), logps)
    with pytest.raises(ValueError, match="other pairs or weights"):
        stage.read_cache(str(tmp_path), key, 4)
    path.write_bytes(b"no tensor")
    with pytest.raises(ValueError, match="holds no log-probs"):
        stage.read_cache(str(tmp_path), key, 3)


def test_a_pair_is_two_sequences():
    sizes = derive_pairs(global_batch=16, micro_batch=4, data_parallel=2, train_iters=5)
    assert (sizes.prompts, sizes.members, sizes.global_batch, sizes.train_iters) == (8, 2, 16, 5)
