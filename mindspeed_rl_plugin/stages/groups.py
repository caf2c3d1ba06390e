"""Groups: statistics of each group's grades, and which groups a rollout trains on, in which order.

A rollout is sampled in rounds; each round is one epoch of the dock. Without dynamic sampling the first round that can
be trained on is the rollout. With it, groups without signal (equal rewards) are replaced: rounds follow until enough
groups have signal, and surplus groups are deferred to the next rollout. Only the stage `Groups` uses the dock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mindspeed_rl_plugin.forward import Step
from mindspeed_rl_plugin.forward.fragments import Common, common_tokens, first_paths, row_sizes
from mindspeed_rl_plugin.rows import Group, Rows, SampleId
from mindspeed_rl_plugin.stages.reward import FailureLog
from mindspeed_rl_plugin.stages.stage import Stage, StageSpec

PLAIN_ROUNDS = 5  # limit without dynamic sampling; a further round follows only if a step would have no row to train


class Groups(Stage):
    """The stage: statistics of all groups, once every rank has graded its share."""

    failures: FailureLog  # failures that were printed

    def begin(self) -> None:
        """Start a rollout: no failure in it was printed yet."""
        self.failures = FailureLog()

    def run(self, ids: Sequence[SampleId]) -> Mapping[Group, GroupStats]:
        """Statistics of all ranks' groups. ids: of this rank's groups, maybe none. Collective."""
        rows = self.look(ids)
        if self.context.config.forward.share_prompts:
            rows = rows.with_columns(**self.dock.read(ids, ["tokens"]).columns)
        stats = group_stats(rows)
        parts = self.context.ranks.gather((stats, self.context.graders.take_failures()))
        self.failures.add([failed for _, failed in parts], show=self.context.leader)
        return {group: of_group for stats, _ in parts for group, of_group in stats.items()}


SPEC = StageSpec(
    "groups",
    reads=("reward", "graded", "grader_error", "length"),
    writes=(),
    resource="cpu",
    if_written=("valid", "paths"),
    leases=False,
    build=Groups,
)


@dataclass(frozen=True)
class GroupStats:
    """Statistics of one group."""

    broken: bool  # a grade failed
    signal: bool  # its task rewards differ, and it is not `idle`
    reward: float  # mean of its task rewards
    lengths: tuple[int, ...] = ()  # tokens of each sample, by member, as `row_sizes`
    errors: int = 0  # samples on which a grader failed
    empty: bool = False  # a user's stage left no row to train on
    common: Common = ()  # tokens that its rows share, if there are tokens

    @property
    def idle(self) -> bool:
        """Whether it has no row to train on."""
        return self.broken or self.empty


@dataclass(frozen=True)
class Selection:
    """The decision about all groups after a round."""

    trained: tuple[Group, ...] = ()  # the rollout, in training order; empty: a further round is needed
    deferred: tuple[Group, ...] = ()  # with signal, for the next round or rollout
    dropped: tuple[Group, ...] = ()  # cleared from the dock
    # groups of `trained` without a row to train on, or that only fill the batch; no loss counts them
    idle: frozenset[Group] = frozenset()
    kept: tuple[Group, ...] = ()  # without signal; they may fill the batch after the next round


def group_stats(rows: Rows) -> dict[Group, GroupStats]:
    """Statistics of complete groups from the columns of `SPEC`, and `tokens` if rows run common tokens once; `reward`
    is the task reward, before any penalty."""
    members: dict[Group, list[int]] = {}
    for i, sample in enumerate(rows.ids):
        members.setdefault(sample[:2], []).append(i)
    shared = "tokens" in rows.columns
    stats, sizes, firsts = {}, row_sizes(rows, shared), first_paths(rows) if shared else ()
    for group, mine in members.items():
        reward, broken = rows["reward"][mine].double(), not bool(rows["graded"][mine].all())
        empty = "valid" in rows.columns and not bool(rows["valid"][mine].any())
        in_order = sorted(mine, key=rows.ids.__getitem__)
        stats[group] = GroupStats(
            broken,
            signal=bool(reward.min() < reward.max()) and not broken and not empty,
            reward=float(reward.mean()),
            lengths=tuple(sizes[i] for i in in_order),
            errors=int(rows["grader_error"][mine].sum()),
            empty=empty,
            common=common_tokens([firsts[i] for i in in_order]) if shared else (),
        )
    return stats


def choose(
    deferred: Sequence[Group], sampled: Mapping[Group, GroupStats], wanted: int, *, dynamic: bool, last: bool
) -> Selection:
    """Which groups to train, defer, drop or keep after a round.

    deferred: earlier groups with signal, oldest first.
    sampled: groups of the round.
    wanted: groups of a rollout.
    dynamic: whether groups without signal are replaced.
    last: whether groups without signal may fill the rollout, spread evenly over it; they count in no loss. If there are
    too few of them (after a small round), they are kept, and one more round follows.
    Source: DAPO, arXiv 2503.14476, section 3.2 and Algorithm 1. There, surplus groups are not deferred.
    """
    order = sorted(sampled)
    if not dynamic:
        return Selection(tuple(order), idle=frozenset(g for g in order if sampled[g].idle))
    ready = sorted([*deferred, *(g for g in order if sampled[g].signal)])
    silent = [g for g in order if not sampled[g].signal]
    if len(ready) >= wanted:
        return Selection(tuple(ready[:wanted]), tuple(ready[wanted:]), tuple(silent))
    if not last:
        return Selection(deferred=tuple(ready), dropped=tuple(silent))
    if len(ready) + len(silent) < wanted:
        return Selection(deferred=tuple(ready), kept=tuple(silent))
    fill = silent[: wanted - len(ready)]
    return Selection(_spread(ready, fill), dropped=tuple(silent[len(fill) :]), idle=frozenset(fill))


def idle_steps(plan: Sequence[Step], idle: Iterable[Group]) -> int:
    """Number of optimizer steps without a row to train on; momentum and weight decay would still change the weights."""
    return sum(all((s.epoch, s.group) in idle for s in step.ids) for step in plan)


class Rounds:
    """Selection over the rounds of a rollout: with dynamic sampling until enough groups have signal, else until every
    optimizer step has a row to train on.

    deferred: earlier groups with signal, oldest first.
    wanted: groups of a rollout.
    limit: most rounds (of `wanted` groups) of dynamic sampling, 0 without it.
    plan: groups -> their optimizer steps.
    """

    def __init__(
        self, deferred: Sequence[Group], wanted: int, limit: int, plan: Callable[[Sequence[Group]], list[Step]]
    ) -> None:
        self.wanted, self.dynamic, self.limit, self.plan = wanted, bool(limit), limit or PLAIN_ROUNDS, plan
        self.selection, self.resumed = Selection(deferred=tuple(deferred)), len(deferred)
        self.steps: list[Step] = []  # of the last round's selection
        self.dropped: str | None = None  # why the last round is dropped; new prompts follow
        self._kept: dict[Group, GroupStats] = {}
        # rounds, groups, groups with signal, samples with errors
        self.rounds = self.sampled = self.signal = self.errors = 0
        self.reward = 0.0

    def add(self, graded: Mapping[Group, GroupStats]) -> bool:
        """Select groups after a round. Returns whether the rollout is complete. Raises ValueError if it is not and no
        further round may follow."""
        self._count(graded)
        dynamic, last, at_hand = self.dynamic, self.rounds == self.limit, graded
        if dynamic:  # rounds may be smaller than a rollout in the asynchronous schedule
            last, at_hand = self.sampled >= self.limit * self.wanted, {**self._kept, **graded}
        deferred = self.selection.deferred
        self.selection = chosen = choose(deferred, at_hand, self.wanted, dynamic=dynamic, last=dynamic and last)
        self._kept = {group: at_hand[group] for group in chosen.kept}
        self.steps = self.plan(chosen.trained) if chosen.trained else []
        empty = idle_steps(self.steps, chosen.idle)
        if self.steps and not empty:
            return True
        self.dropped = None if dynamic else _useless(graded, empty)
        if last and chosen.trained:
            raise ValueError(self._exhausted(graded, empty))
        return False

    def metrics(self) -> dict[str, float]:
        """Metrics of sampling the rollout, named as in `monitor.names`; without dynamic sampling only the number of
        errors."""
        errors = {"reward/errors": float(self.errors)}  # also of groups that are not trained
        if not self.dynamic:
            return errors
        return {
            **errors,
            "sampling/rounds": float(self.rounds),
            "sampling/groups_drawn": float(self.sampled),
            "sampling/informative": self.signal / max(self.sampled, 1),
            "sampling/reward_mean": self.reward / max(self.sampled, 1),
            "sampling/brought": float(self.resumed),
            "sampling/carried": float(len(self.selection.deferred)),
            "sampling/filled": float(len(self.selection.idle)),
        }

    def _count(self, graded: Mapping[Group, GroupStats]) -> None:
        of_groups = graded.values()
        rewards = [stats.reward for stats in of_groups if not stats.broken]
        self.rounds += 1
        self.sampled += len(graded)
        self.errors += sum(stats.errors for stats in of_groups)
        self.signal += sum(stats.signal for stats in of_groups)
        self.reward += sum(rewards) * len(graded) / max(len(rewards), 1)

    def _exhausted(self, graded: Mapping[Group, GroupStats], empty: int) -> str:
        if self.dropped:
            return (
                f"{self.rounds} rollouts in a row were dropped; in the last one {self.dropped}; repair this cause, and "
                "resume from the last checkpoint"
            )
        broken = sum(stats.broken for stats in graded.values())
        return (
            f"--rl-dynamic-sampling-rounds {self.limit}: rewards differ in {self.signal} of the {self.sampled} groups "
            f"sampled (mean reward {self.reward / self.sampled:g}; graders failed in {broken} groups of the last "
            f"round), so {empty} optimizer steps would train on nothing: the prompts are too easy or too hard for the "
            "policy; resume with other prompts, more rounds, or --no-rl-dynamic-sampling"
        )


def _useless(graded: Mapping[Group, GroupStats], empty: int) -> str:
    broken = sum(stats.broken for stats in graded.values())
    invalid = sum(stats.empty and not stats.broken for stats in graded.values())
    why = f"graders failed in {broken} of {len(graded)} groups"
    why += f", --rl-stage left no valid row in {invalid}" if invalid else ""
    return f"{why}, so {empty} optimizer steps would train on nothing"


def _spread(ready: Sequence[Group], fill: Sequence[Group]) -> tuple[Group, ...]:
    """Merge two lists: each list keeps its order, and is spread evenly over the result."""
    placed = [((i + 0.5) / len(part), part is fill, g) for part in (ready, fill) for i, g in enumerate(part)]
    return tuple(g for _, _, g in sorted(placed))
