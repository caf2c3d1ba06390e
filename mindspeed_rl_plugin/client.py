"""Connects your program to a running job (`--rl-schedule async`): as an engine that answers prompts, as a source of
prompts, or as an observer.

    with Client("10.0.0.5:41167", "SAVE/rl/secret") as job:
        while not job.ended:
            version, weights = job.weights()              # by Hugging Face names
            prompts = job.take(max_rows=64, deadline=5)   # a TensorDict
            job.give(responses(prompts))                  # a TensorDict too
            print(job.metrics())

The job prints its address and secret file at its start. Rows are TensorDicts of batch size `[B]`: "ids" is `[B, 3]`; a
column with several entries per row is a jagged nested tensor. See also docs/service.md.
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
from mindspeed_rl_plugin.engine.routes import ROUTES
from mindspeed_rl_plugin.generators.description import job_of, weights_of
from mindspeed_rl_plugin.rows import FINISH, Column, Completion, GenerateRequest, Ragged, Rows, Sampling
from mindspeed_rl_plugin.service.guest_dock import GuestDock, here
from mindspeed_rl_plugin.stages.generate import SPEC, completion_rows, requests_of
from mindspeed_rl_plugin.weights.published_memory import sources_of
from mindspeed_rl_plugin.weights.pull import pull_tensors

if TYPE_CHECKING:
    from tensordict import TensorDict

Ids = Sequence[tuple[int, int, int]] | Tensor
# Columns of `give`: whether a row has several entries, their kind, their shape, and their meaning.
GIVEN = {
    "response": (True, "integers", [], "tokens"),
    "logps": (True, "floats", [], "a log-prob of each token"),
    "version": (False, "integers", [], "version of the weights"),
    "finish": (False, "integers", [], "0 or 1"),
    "segments": (True, "integers", [2], "(first token, version) of each part"),
    "routes": (True, "integers", None, "ids of experts, [layers with experts, experts a token]"),
}


class Client:
    """Connects a process that is not a rank of the job. For one thread; each further thread makes its own `Client`.

    address: HOST:PORT or unix:NAME.
    secret: the job's secret (bytes), or the path of a file with it (mode 600).
    lease_seconds: how long rows of `take` are reserved. After this time they are given to another engine too, and the
    first response counts.

    Raises ConnectionError if no job answers, PermissionError for a wrong secret, and ValueError for a job of another
    version of the package, or without --rl-schedule async.
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
        self.newest()  # opens the connection on which the job announces its end

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> bool:
        """Leave the job. A ConnectionError is not raised if its reason is that the job has ended."""
        over = isinstance(error, ConnectionError) and self.dock.has_left()
        self.close()
        return over

    def close(self) -> None:
        """Leave the job; other engines get the taken rows that have no response yet. Idempotent."""
        self.dock.close()

    # the job

    @property
    def ended(self) -> bool:
        """Whether a call has found that the job has ended. Then calls have empty results, or raise ConnectionError."""
        return self.dock.ended

    @property
    def model_config(self) -> dict[str, Any]:
        """config.json of the model."""
        return dict(self._job.engine.config)

    @property
    def sampling(self) -> Sampling:
        """How responses must be sampled; rows that `take` marks as greedy are sampled greedily."""
        return self._job.sampling

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end a response."""
        ends = () if self._job.sampling.ignore_eos else self._job.engine.eos_token_ids
        return (*ends, *self._job.sampling.stop_token_ids)

    @property
    def columns(self) -> dict[str, str]:
        """Name of each column of the job -> a description of its cells."""
        return {name: column.describe() for name, column in self.dock.columns.items()}

    @property
    def stages(self) -> dict[str, tuple[str, ...]]:
        """Name of each stage of the job that reads rows -> columns that it writes."""
        return {name: state.writes for name, state in self.dock.states.items()}

    def metrics(self, deadline: float = 0.0) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl since the last call; at the first call those since the job's start (the job keeps
        the last 1000). Waits at most `deadline` seconds until there is a line."""
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
        """Rows that need a response, at most `max_rows`; empty if there are none within `deadline` seconds, or if the
        job has ended.

        "prompt": its tokens; "oldest", "newest" `[B]`: first and last version of the weights that may sample the row,
        -1: no limit; "greedy" `[B]`: always take the most likely token (evaluations); "seed" `[B]`: for this response,
        optional to use. Raises ValueError for max_rows below 1, for a job with --rl-async-order strict, and for a job
        with tools or environments.
        """
        if max_rows < 1:
            raise ValueError(f"take: max_rows is {max_rows}; give at least 1")
        if self._job.strict:
            raise ValueError("take: only the launcher's engines get rows with --rl-async-order strict; set it to free")
        if self._job.environments is not None:
            raise ValueError(
                "take: this job has tools or environments, which only engines of this package can call; add an engine "
                "with `generate --join` instead"
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
        """Give responses to all or some of the taken rows, each row once.

        "ids" `[B, 3]`; "response": sampled tokens, with the end token; "logps": log-prob of each token, in nats, under
        the distribution that it was sampled from (greedy: that of temperature 1); "version" `[B]`: of the weights. If
        several versions sampled a response, "segments" `[S, 2]` instead of "version": (its first token in the response,
        version) of each part. "finish" `[B]`: 0 if an end token or string ended the response, 1 if the limit did;
        default: by the last token. A job that replays routes needs "routes" `[P + R, M, K]` too: entry t + 1 has the
        experts of token t of prompt and response in each layer with experts, and entry 0 zeros. Raises ValueError for
        invalid rows, or rows that were not taken. Rows are written in parts: each has rows of one `take`, rollout and
        machine, at most 64 MiB. Of a part with an error nothing is written; all given rows of its `take` stay taken:
        give them again, or `release` them. Earlier parts are written.
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
        """Give back the taken rows that have no response yet, so that other engines get them."""
        for lease in {lease.token: lease for lease, _ in self._taken.values()}.values():
            self.dock.release(lease)
        self._taken.clear()

    def report(self, counts: Mapping[str, float]) -> None:
        """Report this engine's counts since it joined, for metrics: "seconds" (in all), "back-pressure" (seconds of
        waiting for prompts), "version" (seconds of waiting for weights), "responses" and "tokens". If the counts of an
        engine that reports "seconds" do not change for half of --rl-wait-timeout, other engines get its rows."""
        self._reported = True
        self.dock.report(counts)

    # a data source

    def offer(self, rows: Iterable[Mapping[str, Any]], deadline: float = 0.0) -> list[int]:
        """Offer prompts for the next rollouts, which take them before those of --rl-prompt-data. A row has the fields
        of a row of the data: prompt (a string, or messages), answer and others, all of types that JSON has.

        Returns a number below 0 for each row: "row" in the column `meta` of the row's responses. The job accepts all
        rows or none. It accepts none until it has read its checkpoint, and while too many offered rows wait (rollouts
        take them when weights are published): then this call waits, and raises TimeoutError after `deadline` seconds.
        Raises ValueError for rows that would be wrong in the data too, for a prompt that is too long, for rows of more
        than four rollouts in one call, and for a job with --rl-async-order strict.
        """
        if self._job.strict:
            raise ValueError(
                "offer: the rollout of an offered prompt depends on the time of the offer, but with --rl-async-order "
                "strict runs must be equal bit for bit; give --rl-async-order free"
            )
        return self.dock.submit_prompts([_as_json(i, row) for i, row in enumerate(rows)], deadline)

    # weights

    @property
    def names(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name of each tensor of the model -> its shape."""
        return {name: tuple(tensor.shape) for name, tensor in self._weights.tensors.items()}

    def newest(self, after: int = -1, deadline: float = 0.0) -> int:
        """The newest version of the weights; -1: there is none yet. Waits at most `deadline` seconds until it is above
        `after`. Versions count optimizer steps."""
        end, news = time.monotonic() + deadline, self.dock.news(0, 0.0)
        while news.version <= after and (left := end - time.monotonic()) > 0:
            news = self.dock.news(news.number, left)
        return news.version

    def versions(self, deadline: float = 60.0) -> list[int]:
        """Versions that all trainer ranks have now, in rising order."""
        every = [set(source.versions(deadline)) for source in self._sources]
        return sorted(set.intersection(*every))

    def weights(
        self, version: int | None = None, names: Sequence[str] | None = None, deadline: float = 600.0
    ) -> tuple[int, dict[str, Tensor]]:
        """The version that was read (`version`; None: the newest), and its complete tensors by Hugging Face names, on
        the host, in the engine's dtype (--rl-engine-dtype): all tensors, or those in `names`. Waits at most
        `deadline` seconds for the version.

        Raises `mindspeed_rl_plugin.dock.Gone` for a version that newer weights have overwritten.
        """
        end = time.monotonic() + deadline
        while True:
            try:
                left = end - time.monotonic()
                return pull_tensors(self._weights, self._sources, version, names, left)
            except Gone:  # newer weights have overwritten this version during the read
                if version is not None:
                    raise

    # an observer

    def finished(self, stage: str = "reward") -> Tensor:
        """`[n, 3]` ids of the rows that a stage has finished and the job still has (until the last optimizer step of
        the rollout). Rows of an evaluation have a rollout number below 0. Raises ValueError for an unknown stage."""
        if stage not in self.stages:
            raise ValueError(f"finished: no stage {stage!r}; this job has stages {', '.join(sorted(self.stages))}")
        return torch.tensor(self.dock.finished(stage), dtype=torch.int64).reshape(-1, 3)

    def read(self, ids: Ids, columns: Iterable[str]) -> TensorDict:
        """Columns of rows from `finished`. Rows that the job does not have any more, or that lack one of the columns,
        are left out; "ids" has the ids of the rows that were read."""
        wanted = [SampleId(*i) for i in (ids.tolist() if isinstance(ids, Tensor) else ids)]
        return to_tensordict(self.dock.peek(wanted, tuple(columns)))

    # inside

    def _leased(self, max_rows: int, deadline: float) -> Lease:
        """Lease rows that are ready within the deadline; empty if there are none, or if the job has ended."""
        try:
            if not self._reported:
                self.report({})  # after this the job counts it among its engines
            return self.dock.lease(SPEC.name, max_rows=max_rows, deadline=deadline)
        except TimeoutError:
            pass
        except ConnectionError:
            if not self.dock.has_left():
                raise
        return Lease(0, SPEC.name, Rows((), {"prompt": Ragged.from_rows([], torch.int32)}))

    def _check(self, given: Rows) -> None:
        """Raise ValueError for rows that are not taken, and for columns of a wrong form. The job checks the values."""
        names = set(given.columns)
        routes = {ROUTES} if self._job.engine.record_routes else set()
        needed, known = {"response", "logps", "segments" if "segments" in names else "version"} | routes, {*GIVEN}
        if not needed <= names <= (known if routes else known - {ROUTES}):
            raise ValueError(
                f"give: got the columns {sorted(names)}; needed are response, logps, and version or segments; allowed "
                f"are {', '.join(name for name in GIVEN if name != ROUTES)}; routes are "
                f"{'needed' if routes else 'not allowed'} in this job"
            )
        for name in sorted(names):
            _check_form(name, given[name])
        if strange := [tuple(i) for i in given.ids if i not in self._taken]:
            raise ValueError(f"give: {len(strange)} rows were not taken or are given already, first: {strange[0]}")
        if not torch.equal(given["response"].lengths, given["logps"].lengths):
            raise ValueError("give: response and logps differ in length; each token has one log-prob")
        tokens = given["response"].values
        if len(wide := tokens[tokens.int() != tokens]):
            raise ValueError(f"give: token {wide[0]} has more than 32 bits; use the tokenizer of the job")
        if routes and (ids := given[ROUTES].values).ne(ids.to(dtype := self.dock.columns[ROUTES].dtype)).any():
            raise ValueError(f"give: 'routes' has entries that are no {dtype}; give ids of experts")

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
                f"({FINISH[0]}) or 1 ({FINISH[1]}), and at least one segment"
            )
        columns: dict[str, Column] = {}
        if ROUTES in given.columns:
            columns[ROUTES] = Ragged.from_rows([given[ROUTES].row(row)], self.dock.columns[ROUTES].dtype)
        logps = tuple(given["logps"].row(row).tolist())
        return Completion(given.ids[row], tokens, logps, FINISH[finish], segments, columns=columns)


def _check_form(name: str, column: Column) -> None:
    """Raise ValueError for a column that differs from `GIVEN`."""
    several, kind, entry, what = GIVEN[name]
    if isinstance(column, Ragged) != several:
        form = "several entries per row: give a jagged nested tensor" if several else "one number per row: give [B]"
        raise ValueError(f"give: {name!r} has {form}")
    values = column.values if several else column
    if (got := (numbers(values), list(values.shape[1:])))[0] != kind or entry not in (None, got[1]):
        raise ValueError(
            f"give: {name!r} has entries of shape {got[1]}, {values.dtype}; give {kind} of shape {entry}: {what}"
        )


def _as_json(number: int, row: Mapping[str, Any]) -> str:
    try:
        return json.dumps(row)
    except TypeError as error:
        raise ValueError(f"offer: row {number}: {error}; give strings, numbers, lists and dictionaries") from error
