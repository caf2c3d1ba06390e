"""Which groups a rollout trains on, and in which order: all that were drawn, or DAPO's dynamic sampling. Pure.

A rollout is drawn in rounds; each round is one epoch of the dock. Without dynamic sampling the first round that can be
trained on is the rollout. With it, groups whose rewards are all equal are replaced: rounds follow until enough groups
carry signal, and those beyond are carried over to the next rollout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mindspeed_rl_plugin.algorithms import group_index
from mindspeed_rl_plugin.algorithms.selection import carries_signal
from mindspeed_rl_plugin.forward import Step, plan_batches
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId

Group = tuple[int, int]  # epoch of the dock, and number within it
Lengths = Mapping[Group, Sequence[int]]  # tokens of each sample of a group, by member
PLAIN_ROUNDS = 5  # rounds without dynamic sampling: a further one only where graders leave a step nothing to train on


@dataclass(frozen=True)
class Verdict:
    """What grading says of one group. broken: a grade failed; signal: its task rewards differ; reward: their mean;
    lengths: tokens of each sample, by member; errors: samples on which a grader failed."""

    broken: bool
    signal: bool
    reward: float
    lengths: tuple[int, ...] = ()
    errors: int = 0


@dataclass(frozen=True)
class Choice:
    """What becomes of the groups at hand after a round.

    trained: the rollout, in training order, empty where a further round is needed; carried: groups with signal that
    wait for the next round or rollout; dropped: groups that are forgotten; idle: those of `trained` that no loss
    counts, because a grade failed or because they only fill the batch up.
    """

    trained: tuple[Group, ...] = ()
    carried: tuple[Group, ...] = ()
    dropped: tuple[Group, ...] = ()
    idle: frozenset[Group] = frozenset()


def verdicts(rows: Rows, tokens: Ragged | None = None) -> dict[Group, Verdict]:
    """Judge whole groups from their columns `reward` (task reward, before any penalty), `graded` and `grader_error`;
    tokens: the same rows' tokens, where lengths are wanted."""
    if not len(rows):
        return {}
    index, reward = group_index(rows.ids), rows["reward"].double()
    signal, failed = carries_signal(rows["reward"], index), rows["graded"] == 0
    lengths = tokens.lengths.tolist() if tokens is not None else []
    found = {}
    for number in index.unique().tolist():
        mine = index == number
        broken = bool(failed[mine].any())
        first = rows.ids[int(mine.nonzero()[0])]
        here = bool(signal[mine].any()) and not broken
        members = sorted((rows.ids[i].member, lengths[i]) for i in mine.nonzero().flatten().tolist()) if lengths else ()
        found[first.epoch, first.group] = Verdict(
            broken,
            here,
            float(reward[mine].mean()),
            tuple(n for _, n in members),
            int(rows["grader_error"][mine].sum()),
        )
    return found


def choose(
    carried: Sequence[Group], drawn: Mapping[Group, Verdict], wanted: int, *, dynamic: bool, last: bool
) -> Choice:
    """Decide after a round.

    carried: groups with signal from before, oldest first; drawn: the round's; wanted: groups of a rollout; dynamic:
    whether groups without signal are replaced; last: whether no further round may follow: then groups of this round
    without signal fill the rollout up, spread evenly over it, and count in no loss. Source: DAPO, arXiv 2503.14476,
    section 3.2 and Algorithm 1; carrying over what is too much is this project's.
    """
    order = sorted(drawn)
    if not dynamic:
        return Choice(tuple(order), idle=frozenset(g for g in order if drawn[g].broken))
    ready = [*carried, *(g for g in order if drawn[g].signal)]
    silent = [g for g in order if not drawn[g].signal]
    if len(ready) >= wanted:
        return Choice(tuple(ready[:wanted]), tuple(ready[wanted:]), tuple(silent))
    if not last:
        return Choice(carried=tuple(ready), dropped=tuple(silent))
    fill = silent[: wanted - len(ready)]
    return Choice(_spread(ready, fill), dropped=tuple(silent[len(fill) :]), idle=frozenset(fill))


def idle_steps(plan: Sequence[Step], idle: Iterable[Group]) -> int:
    """Optimizer steps that would train on nothing: they would still move the weights, by momentum and weight decay."""
    return sum(all((s.epoch, s.group) in idle for s in step.ids) for step in plan)


def useless(broken: int, groups: int, empty: int) -> str:
    """Why a rollout is dropped, in words."""
    told = f"graders failed in {broken} of {groups} groups, so {empty} optimizer steps of it"
    return f"{told} would train on nothing"


def check_carried(carried: Sequence, before: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Refuse a resume whose groups have another size than those carried over. Raises ValueError."""
    flag = "--rl-samples-per-prompt"
    if carried and before[flag] != now[flag]:
        raise ValueError(
            f"the checkpoint holds {len(carried)} groups of {before[flag]} responses that dynamic sampling carried "
            f"over, {flag} is {now[flag]}: resume with {before[flag]}"
        )


def of_epoch(epoch: int, groups: int) -> tuple[Group, ...]:
    """All groups of one round."""
    return tuple((epoch, g) for g in range(groups))


def samples(groups: Iterable[Group], members: int) -> list[SampleId]:
    """All samples of some groups, group by group."""
    return [SampleId(epoch, group, member) for epoch, group in groups for member in range(members)]


def by_epoch(groups: Iterable[Group]) -> dict[int, list[int]]:
    """Epoch -> its groups among these, both rising."""
    found: dict[int, list[int]] = {}
    for epoch, group in sorted(groups):
        found.setdefault(epoch, []).append(group)
    return found


def plan_groups(groups: Sequence[Group], members: int, **sizes: int) -> list[Step]:
    """Optimizer steps of one pass over groups in the given order; sizes: those of `plan_batches`."""
    places = plan_batches(samples(of_epoch(0, len(groups)), members), **sizes)

    def named(place: SampleId) -> SampleId:
        return SampleId(*groups[place.group], place.member)

    return [
        Step(tuple(tuple(tuple(map(named, batch)) for batch in rank) for rank in step.micro_batches)) for step in places
    ]


@dataclass
class Tally:
    """What drawing one rollout took. brought: groups carried over from before it."""

    brought: int = 0
    rounds: int = 0
    drawn: int = 0
    signal: int = 0
    reward: float = 0.0
    errors: int = 0

    def add(self, round_: Mapping[Group, Verdict]) -> None:
        """Count one round."""
        graded = [v for v in round_.values() if not v.broken]
        self.rounds += 1
        self.drawn += len(round_)
        self.errors += sum(v.errors for v in round_.values())
        self.signal += sum(v.signal for v in round_.values())
        self.reward += sum(v.reward for v in graded) * len(round_) / max(len(graded), 1)

    def exhausted(self, empty: int, broken: int, groups: int, dynamic: bool) -> ValueError:
        """No round may follow, and `empty` optimizer steps have no group to train on; broken: groups of the last round
        with a failed grade, of how many; dynamic: whether groups were dropped for want of signal too."""
        if not dynamic:
            return ValueError(
                f"{self.rounds} rollouts one after the other were dropped; in the last one "
                f"{useless(broken, groups, empty)}; repair the grader and resume from the last checkpoint"
            )
        return ValueError(
            f"--rl-dynamic-sampling-rounds {self.rounds}: rewards differ in {self.signal} of the {self.drawn} groups "
            f"drawn (mean reward {self.reward / self.drawn:g}; graders failed in {broken} groups of the last round), "
            f"so {empty} optimizer steps would train on nothing: the prompts are too easy or too hard for the policy; "
            "resume with others, with more rounds, or with --no-rl-dynamic-sampling"
        )

    def metrics(self, choice: Choice, dynamic: bool) -> dict[str, float]:
        """Metrics of a rollout, named as in `monitor.names`; those of choosing only under dynamic sampling."""
        errors = {"reward/errors": float(self.errors)}  # also of groups that are trained nowhere
        if not dynamic:
            return errors
        return {
            **errors,
            "sampling/rounds": float(self.rounds),
            "sampling/groups_drawn": float(self.drawn),
            "sampling/informative": self.signal / max(self.drawn, 1),
            "sampling/reward_mean": self.reward / max(self.drawn, 1),
            "sampling/brought": float(self.brought),
            "sampling/carried": float(len(choice.carried)),
            "sampling/filled": float(len(choice.idle)),
        }


def _spread(ready: Sequence[Group], fill: Sequence[Group]) -> tuple[Group, ...]:
    """Both in their own order, each spread evenly over the whole."""
    placed = [((i + 0.5) / len(part), part is fill, g) for part in (ready, fill) for i, g in enumerate(part)]
    return tuple(g for _, _, g in sorted(placed))
