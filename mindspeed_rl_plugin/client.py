"""A running job (`--rl-schedule async`) for your own programs: an engine that answers its prompts, a source of prompts,
or an observer.

    with Client("10.0.0.5:41167", "SAVE/rl/secret") as job:
        while not job.ended:
            version, weights = job.weights()              # by Hugging Face names
            prompts = job.take(max_rows=64, deadline=5)   # a TensorDict
            job.give(responses(prompts))                  # another one
            print(job.metrics())

Address and secret are printed at the job's start. Rows are TensorDicts of batch size `[B]`: "ids" is `[B, 3]`, and a
column with several entries a row is a jagged nested tensor. docs/service.md says more.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mindspeed_rl_plugin.dock import Gone, Lease, SampleId, from_tensordict, to_tensordict
from mindspeed_rl_plugin.dock.api import numbers
from mindspeed_rl_plugin.generators.description import job_of, weights_of
from mindspeed_rl_plugin.rows import FINISH, Column, Completion, GenerateRequest, Ragged, Rows, Sampling
from mindspeed_rl_plugin.service.guest_dock import GuestDock, here
from mindspeed_rl_plugin.stages.generate import SPEC, completion_rows, requests_of
from mindspeed_rl_plugin.weights.published_memory import sources_of
from mindspeed_rl_plugin.weights.pull import pull_tensors

if TYPE_CHECKING:
    from tensordict import TensorDict

Ids = Sequence[tuple[int, int, int]] | Tensor
# Columns of `give`: whether a row has several entries, of which numbers each is, its shape, and what it says.
GIVEN = {
    "response": (True, "integers", [], "tokens"),
    "logps": (True, "floats", [], "a log-prob of each token"),
    "version": (False, "integers", [], "that of the weights"),
    "finish": (False, "integers", [], "0 or 1"),
    "segments": (True, "integers", [2], "(first token, version) of each part"),
}


class Client:
    """A process that takes part in a job without being a rank of it. For one thread; another one makes its own.

    address: HOST:PORT or unix:NAME; secret: the job's, or the file of mode 600 that holds it; lease_seconds: life of
    what `take` gave: later it is given to another engine as well, and the first response stays.
    Raises ConnectionError where no job answers, PermissionError for a wrong secret, and ValueError for a job of another
    version of the package, or one that takes no engines.
    """

    def __init__(self, address: str, secret: str | os.PathLike[str] | bytes, *, lease_seconds: float = 600.0) -> None:
        self.dock = GuestDock.join(address, secret, lease_seconds=lease_seconds, who=here("client"))
        try:
            self._job = job_of(self.dock, strict=True)
        except ValueError:
            self.dock.close()
            raise
        self._weights, self._sources = weights_of(self.dock), sources_of(self.dock)
        self._taken: dict[SampleId, tuple[Lease, GenerateRequest]] = {}
        self._records = 0
        self._reported = False
        self.newest()  # over this connection the job says that it leaves

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> bool:
        """Leave; a connection that ended because the job has ended is no error."""
        over = isinstance(error, ConnectionError) and self.dock.has_left()
        self.close()
        return over

    def close(self) -> None:
        """Leave the job; rows that were taken and not given go to other engines. Idempotent."""
        self.dock.close()

    # the job

    @property
    def ended(self) -> bool:
        """Whether the job has left, as the last call has seen. Calls give nothing more then, or raise
        ConnectionError."""
        return self.dock.ended

    @property
    def model_config(self) -> dict[str, Any]:
        """config.json of the model."""
        return dict(self._job.engine.config)

    @property
    def sampling(self) -> Sampling:
        """How responses are to be sampled; `take` says which of them greedily."""
        return self._job.sampling

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end a response."""
        ends = () if self._job.sampling.ignore_eos else self._job.engine.eos_token_ids
        return (*ends, *self._job.sampling.stop_token_ids)

    @property
    def columns(self) -> dict[str, str]:
        """Name of each column of the job -> what its cells are."""
        return {name: column.describe() for name, column in self.dock.columns.items()}

    @property
    def stages(self) -> dict[str, tuple[str, ...]]:
        """Name of each stage of the job that reads rows -> columns that it writes."""
        return {name: state.writes for name, state in self.dock.states.items()}

    def metrics(self, deadline: float = 0.0) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl that were written since the last call, at first those since the job's start, as far
        as it keeps them (1000). Waits for one, at most `deadline` seconds."""
        try:
            told = self.dock.records(self._records, deadline)
        except ConnectionError:
            if not self.dock.has_left():
                raise
            return []
        self._records = told.first - 1 + len(told.lines)
        return [json.loads(line) for line in told.lines]

    # an engine

    def take(self, max_rows: int, deadline: float) -> TensorDict:
        """Rows that ask for a response, at most `max_rows`; none where there are none within `deadline` seconds, or
        where the job has ended.

        "prompt": its tokens; "oldest", "newest" `[B]`: the versions of weights that may sample the row, newest -1 where
        every newer one may, too; "greedy" `[B]`: take the likeliest token each time (evaluations); "seed" `[B]`: of
        this very response, to be used or not.
        Raises ValueError for a job with --rl-async-order strict, whose rows are dealt to engines of its own, for one
        with tools or environments, which only its own engines have, and for fewer rows than one.
        """
        if max_rows < 1:
            raise ValueError(f"take: max_rows is {max_rows}; give at least 1")
        if self._job.strict:
            raise ValueError("--rl-async-order strict deals rollouts to the launcher's engines: take no rows of it")
        if self._job.environments is not None:
            raise ValueError(
                "tools or environments answer the model in this job, which only its own engines have: take no rows of "
                "it; bring an engine by `generate --join`"
            )
        lease = self._leased(max_rows, deadline)
        prompts, bounds = lease.rows["prompt"], [self.dock.version_bound(i.epoch) for i in lease.rows.ids]
        requests = requests_of(lease.rows, self._job.sampling, self._job.seed)
        self._taken |= {request.id: (lease, request) for request in requests}
        columns = {
            "prompt": prompts,
            "oldest": torch.tensor([bound.oldest for bound in bounds], dtype=torch.int64),
            "newest": torch.tensor([bound.newest for bound in bounds], dtype=torch.int64),
            "greedy": torch.tensor([r.sampling.temperature == 0 for r in requests], dtype=torch.bool),
            "seed": torch.tensor([r.seed for r in requests], dtype=torch.int64),
        }
        return to_tensordict(Rows(lease.rows.ids, columns))

    def give(self, rows: TensorDict) -> None:
        """Responses to rows that were taken, all of them or some; each once.

        "ids" `[B, 3]`; "response": sampled tokens, that which ends it included; "logps": of each the log-prob in nats,
        of the distribution that it was sampled from (of a greedy one that of temperature 1); "version" `[B]`: of the
        weights; where several sampled one response "segments" `[S, 2]` instead: (first token of the response, version);
        "finish" `[B]`: 0 where an end token or string ended it, 1 where the limit did; by default by the last token.
        Raises ValueError for rows that the job cannot take, or that were not taken. What one `take` gave, and what lies
        on one machine, is written as a whole, 64 MiB of cells at most: of such a part nothing is written then, and it
        stays taken: give it again, or `release` it. Parts before it are written.
        """
        given = from_tensordict(rows)
        self._check(given)
        finished: dict[int, list[tuple[Lease, GenerateRequest, Completion]]] = {}
        for row, sample in enumerate(given.ids):
            lease, request = self._taken[sample]
            finished.setdefault(lease.token, []).append((lease, request, self._completion(given, row)))
        for part in finished.values():
            leases, requests, completions = zip(*part, strict=True)
            self.dock.commit_part(leases[0], completion_rows(requests, completions))
            for request in requests:
                del self._taken[request.id]

    def release(self) -> None:
        """Hand back what was taken and not given, for other engines."""
        for lease in {lease.token: lease for lease, _ in self._taken.values()}.values():
            self.dock.release(lease)
        self._taken.clear()

    def report(self, counts: Mapping[str, float]) -> None:
        """What this engine has counted since it joined, for the job's metrics: "seconds", of them "back-pressure" (it
        had no prompts) and "version" (it waited for weights), "responses" and "tokens". One that has reported seconds
        and is silent for half of --rl-wait-timeout is taken to hang: its rows are given out again."""
        self._reported = True
        self.dock.report(counts)

    # a data source

    def offer(self, rows: Iterable[Mapping[str, Any]], deadline: float = 0.0) -> list[int]:
        """Prompts for the next rollouts, which take them before those of --rl-prompt-data. A row has the fields of a
        row of the data: prompt (a string, or messages), answer, and others, all of them JSON.

        Returns a number of each, below 0: "row" in the column `meta` of its responses. Waits for room, and for a job
        that reads its checkpoint, `deadline` seconds; a rollout is admitted with each publication of weights. Of rows
        that are refused none is taken: raises ValueError for those that the data may not have either, for a prompt that
        is too long, for more than four rollouts at once, and in a job with --rl-async-order strict; TimeoutError after
        the deadline.
        """
        if self._job.strict:
            raise ValueError(
                "--rl-async-order strict: runs are equal bit for bit, and which rollout offered prompts come into "
                "depends on the time; give --rl-async-order free"
            )
        return self.dock.submit_prompts([_as_json(i, row) for i, row in enumerate(rows)], deadline)

    # weights

    @property
    def names(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name of each tensor of the model -> its shape."""
        return {name: tuple(tensor.shape) for name, tensor in self._weights.tensors.items()}

    def newest(self, after: int = -1, deadline: float = 0.0) -> int:
        """The newest version of the weights, -1 before the first. Waits for one above `after`, at most `deadline`
        seconds. Versions count optimizer steps."""
        end, news = time.monotonic() + deadline, self.dock.news(0, 0.0)
        while news.version <= after and (left := end - time.monotonic()) > 0:
            news = self.dock.news(news.number, left)
        return news.version

    def versions(self, deadline: float = 60.0) -> list[int]:
        """Versions that all trainer ranks hold now, by rising number."""
        every = [set(source.versions(deadline)) for source in self._sources]
        return sorted(set.intersection(*every))

    def weights(
        self, version: int | None = None, names: Sequence[str] | None = None, deadline: float = 600.0
    ) -> tuple[int, dict[str, Tensor]]:
        """A version (None: the newest), and its tensors by Hugging Face names, whole, on the host, as the engine would
        have them (--rl-engine-dtype): all, or those of `names`. Waits for a version to come, `deadline` seconds.

        Raises `mindspeed_rl_plugin.dock.Gone` for one that newer ones have taken the place of.
        """
        end = time.monotonic() + deadline
        while True:
            try:
                left = end - time.monotonic()
                return pull_tensors(self._weights, self._sources, version, names, left)
            except Gone:  # newer ones came while the newest was read
                if version is not None:
                    raise

    # an observer

    def finished(self, stage: str = "reward") -> Tensor:
        """`[n, 3]` ids of the rows that a stage is done with and the job still holds: until their last optimizer step.
        Rows of an evaluation have a rollout below 0. Raises ValueError for no stage of this job."""
        if stage not in self.stages:
            raise ValueError(f"finished: no stage {stage!r}; this job has {', '.join(sorted(self.stages))}")
        return torch.tensor(self.dock.finished(stage), dtype=torch.int64).reshape(-1, 3)

    def read(self, ids: Ids, columns: Iterable[str]) -> TensorDict:
        """Columns of rows that `finished` has named. Rows that the job holds no longer, or that lack one of the
        columns, are left out: "ids" says which are there."""
        wanted = [SampleId(*i) for i in (ids.tolist() if isinstance(ids, Tensor) else ids)]
        return to_tensordict(self.dock.peek(wanted, tuple(columns)))

    # inside

    def _leased(self, max_rows: int, deadline: float) -> Lease:
        """Rows that are ready within the deadline, or none."""
        try:
            if not self._reported:
                self.report({})  # by which the job counts it among its engines
            return self.dock.lease(SPEC.name, max_rows=max_rows, deadline=deadline)
        except TimeoutError:
            pass
        except ConnectionError:
            if not self.dock.has_left():
                raise
        return Lease(0, SPEC.name, Rows((), {"prompt": Ragged.from_rows([], torch.int32)}))

    def _check(self, given: Rows) -> None:
        """Raise ValueError for what cannot be made into rows. What they say is checked by the job."""
        names = set(given.columns)
        needed = {"response", "logps", "segments" if "segments" in names else "version"}
        if not needed <= names <= {*GIVEN}:
            raise ValueError(
                f"give: needs response, logps, and version or segments; may have {', '.join(GIVEN)}; got "
                f"{sorted(names)}"
            )
        for name in sorted(names):
            _check_form(name, given[name])
        if strange := [tuple(i) for i in given.ids if i not in self._taken]:
            raise ValueError(f"give: {len(strange)} rows are not taken (first: {strange[0]}), or were given already")
        if not torch.equal(given["response"].lengths, given["logps"].lengths):
            raise ValueError("give: response and logps differ in length; each token has one log-prob")
        tokens = given["response"].values
        if len(wide := tokens[tokens.int() != tokens]):
            raise ValueError(f"give: token {wide[0]} has more than 32 bits, as no model's; is it the job's tokenizer?")

    def _completion(self, given: Rows, row: int) -> Completion:
        tokens = tuple(given["response"].row(row).tolist())
        finish = int(tokens[-1:] == () or tokens[-1] not in self.end_tokens)
        if "finish" in given.columns:
            finish = int(given["finish"][row])
        segments = ((0, int(given["version"][row])),) if "version" in given.columns else ()
        if "segments" in given.columns:
            segments = tuple((first, version) for first, version in given["segments"].row(row).tolist())
        if not 0 <= finish < len(FINISH) or not segments:
            raise ValueError(
                f"give: row {tuple(given.ids[row])} has finish {finish} and segments {segments}; give finish 0 "
                f"({FINISH[0]}) or 1 ({FINISH[1]}), and a segment at least"
            )
        return Completion(given.ids[row], tokens, tuple(given["logps"].row(row).tolist()), FINISH[finish], segments)


def _check_form(name: str, column: Column) -> None:
    """Raise ValueError for a column that is not as `GIVEN` says."""
    several, kind, entry, what = GIVEN[name]
    if isinstance(column, Ragged) != several:
        form = "several entries a row: make it a jagged nested tensor" if several else "one number a row: make it [B]"
        raise ValueError(f"give: {name!r} has {form}")
    values = column.values if several else column
    if (got := (numbers(values), list(values.shape[1:]))) != (kind, entry):
        raise ValueError(
            f"give: {name!r} has entries of shape {got[1]}, {values.dtype}; give {kind} of shape {entry}: {what}"
        )


def _as_json(number: int, row: Mapping[str, Any]) -> str:
    try:
        return json.dumps(row)
    except TypeError as error:
        raise ValueError(f"offer: row {number}: {error}; give strings, numbers, lists and dictionaries") from error
