"""What an engine does next: a table of situations, and whole runs by a virtual clock with slow pulls."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from mindspeed_rl_plugin.generators.choice import Bound, Choice, Situation, choose
from mindspeed_rl_plugin.rows import Completion, GenerateRequest, Ragged, Rows, SampleId, Sampling
from mindspeed_rl_plugin.stages.generate import completion_rows
from mindspeed_rl_plugin.stages.incoming import Incoming

FREE = Bound(1)
BEGUN = Situation(version=1, announced=1, slots=4)
TABLE = {
    "nothing is published yet": (Situation(), Choice(wait=True)),
    "the first weights": (Situation(announced=0), Choice(pull=0)),
    "they are on their way": (Situation(announced=0, pulling=0), Choice(wait=True)),
    "they lie ready": (Situation(announced=0, pulled=0), Choice(apply=0)),
    "free slots": (replace(BEGUN, running=[FREE]), Choice(take=3)),
    "no free slot": (replace(BEGUN, running=[FREE] * 4), Choice()),
    "newer weights are pulled beside work": (replace(BEGUN, running=[FREE], announced=2), Choice(pull=2)),
    "rows are taken while they are on their way": (
        replace(BEGUN, running=[FREE], announced=2, pulling=2),
        Choice(take=3),
    ),
    "put in under rows in the making": (replace(BEGUN, running=[FREE], announced=2, pulled=2), Choice(apply=2)),
    "drain: these end first, and none begins": (
        replace(BEGUN, running=[FREE], announced=2, pulled=2, drain=True),
        Choice(),
    ),
    "drain: newer ones that come meanwhile wait for it": (
        replace(BEGUN, running=[FREE], announced=3, pulled=2, drain=True),
        Choice(),
    ),
    "drain: all have ended": (replace(BEGUN, announced=2, pulled=2, drain=True), Choice(apply=2)),
    "an evaluation pins its weights": (
        replace(BEGUN, running=[Bound(1, 1)], announced=2, pulled=2),
        Choice(take=3),
    ),
    "held rows wait, and none is taken": (
        replace(BEGUN, running=[FREE], held=[Bound(2)], announced=2, pulling=2),
        Choice(),
    ),
    "nothing but held rows": (replace(BEGUN, held=[Bound(2)], announced=2, pulling=2), Choice(wait=True)),
    "held rows go on in their order": (
        replace(BEGUN, version=2, announced=2, held=[Bound(2), Bound(2, 2), Bound(3)]),
        Choice(resume=2),
    ),
    "an evaluation of older weights": (
        replace(BEGUN, version=2, announced=2, held=[Bound(1, 1)]),
        Choice(pull=1),
    ),
    "it does not bring them under rows that they may not sample": (
        replace(BEGUN, version=2, announced=2, running=[Bound(2)], held=[Bound(1, 1)], pulled=1),
        Choice(),
    ),
    "older weights than wanted, newer than its own": (replace(BEGUN, announced=3, pulled=2), Choice(apply=2)),
    "strict: no weights before rows want them": (Situation(announced=0, strict=True, slots=4), Choice(take=4)),
    "strict: rows want them": (Situation(announced=0, strict=True, held=[Bound(0, 0)]), Choice(pull=0)),
    "strict: newer ones are not wanted": (replace(BEGUN, announced=2, strict=True), Choice(take=4)),
    "strict: one rollout after the other": (replace(BEGUN, strict=True, running=[Bound(1, 1)]), Choice()),
}


@pytest.mark.parametrize("case", TABLE)
def test_the_next_thing_to_do(case):
    situation, expected = TABLE[case]
    assert choose(situation) == expected


@pytest.mark.parametrize("seed", range(60))
def test_every_row_is_sampled_by_weights_that_may_sample_it(seed):
    """Publications come while pulls are slow and rows are in the making; rows are admitted with bounds, some pinned.
    The job takes all rows that come out of it."""
    dice = random.Random(seed)
    drain, slots = dice.random() < 0.4, dice.randint(1, 5)
    dock: list[Bound] = []
    s = Situation(slots=slots, drain=drain)
    running: list[list] = []  # bound, steps left, (steps before, version) of each part, steps
    held: list[Bound] = []
    arrives, newest, done, admitted = -1, -1, [], 0
    for step in range(4000):
        if newest < 12 and step % dice.randint(5, 40) == 0 and len(dock) + len(held) < 20:
            newest += 1
            bounds = [Bound(newest)] * dice.randint(0, 6) + [Bound(newest, newest)] * dice.choice((0, 0, 3))
            dock, admitted = (
                [b for b in bounds if b.pinned] + dock + [b for b in bounds if not b.pinned],
                admitted + len(bounds),
            )
        s = replace(s, announced=newest, running=[r[0] for r in running], held=list(held))
        if s.pulling >= 0 and step >= arrives:
            s = replace(s, pulled=s.pulling, pulling=-1)
        choice = choose(s)
        assert len(running) + choice.resume + choice.take <= slots
        if choice.apply >= 0:
            assert not (drain and running)
            s = replace(s, version=choice.apply, pulled=-1)
            for row in running:
                row[2].append((row[3] - row[1], s.version))
        elif choice.pull >= 0:
            assert s.pulling < 0
            s, arrives = replace(s, pulled=-1, pulling=choice.pull), step + dice.randint(1, 60)
        else:
            rows, held = held[: choice.resume], held[choice.resume :]
            taken, dock = dock[: choice.take], dock[choice.take :]
            for bound in taken:
                (rows if bound.allows(s.version) and not held else held).append(bound)
            steps = [dice.randint(1, 30) for _ in rows]
            running += [[bound, n, [(0, s.version)], n] for bound, n in zip(rows, steps, strict=True)]
        for row in running:
            row[1] -= 1
        done += [row for row in running if row[1] <= 0]
        running = [row for row in running if row[1] > 0]
        if newest == 12 and len(done) == admitted:
            break
    assert len(done) == admitted > 0
    assert all(bound.allows(version) for bound, _, parts, _ in done for _, version in parts)
    assert all(len(parts) == 1 for bound, _, parts, _ in done if bound.pinned or drain)
    job = Incoming(vocab=8, max_response=30)
    job.published = set(range(newest + 1))
    job.check(incoming(done))
    with pytest.raises(ValueError, match="may not sample this row"):
        job.check(incoming([*done[1:], [Bound(newest), 0, [(0, newest - 1)], 1]]))


def incoming(done: Sequence[Sequence]) -> Rows:
    """As they come to the job."""
    requests = [GenerateRequest(SampleId(0, i, 0), (5, 6), Sampling(30), 0) for i in range(len(done))]
    completions = [
        Completion(request.id, (1,) * steps, (-1.0,) * steps, "stop", tuple(parts))
        for request, (_, _, parts, steps) in zip(requests, done, strict=True)
    ]
    prompts = Ragged.from_rows([torch.tensor(request.prompt_tokens) for request in requests], torch.int32)
    order = torch.tensor([[*bound, len(done), 1] for bound, *_ in done])
    return completion_rows(requests, completions).with_columns(prompt=prompts, order=order)
