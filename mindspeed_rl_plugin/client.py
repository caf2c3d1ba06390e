"""Connects your own program to a running job (`--rl-schedule async`): as an engine that answers prompts, as a source of
prompts, or as an observer.

    with Client("10.0.0.5:41167", "SAVE/rl/secret") as job:
        while not job.ended:
            version, weights = job.weights()              # by Hugging Face names
            prompts = job.take(max_rows=64, deadline=5)   # a TensorDict
            job.give(responses(prompts))                  # another one
            print(job.metrics())

Address and secret are printed at the job's start. Rows are TensorDicts of batch size `[B]`: "ids" is `[B, 3]`; a column
with several entries a row is a jagged nested tensor. docs/service.md says more.
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
# Columns of `give`: whether a row has several entries, the kind of numbers, the shape, and the meaning.
GIVEN = {
    "response": (True, "integers", [], "tokens"),
    "logps": (True, "floats", [], "a log-prob of each token"),
    "version": (False, "integers", [], "that of the weights"),
    "finish": (False, "integers", [], "0 or 1"),
    "segments": (True, "integers", [2], "(first token, version) of each part"),
}


class Client:
    """A process that takes part in a job without being a rank of it. For one thread; other threads make their own.

    address: HOST:PORT or unix:NAME.
    secret: of the job, or a file with it, of mode 600.
    lease_seconds: for which rows of `take` are reserved. Later they are also given to another engine, and the first
    response counts.

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
        self.newest()  # opens the connection on which the job announces its end

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> bool:
        """Leave the job. It is no error if the connection ended because the job has ended."""
        over = isinstance(error, ConnectionError) and self.dock.has_left()
        self.close()
        return over

    def close(self) -> None:
        """Leave the job; taken rows without a response go to other engines. Idempotent."""
        self.dock.close()

    # the job

    @property
    def ended(self) -> bool:
        """Whether the job has ended, by the last call. Then calls return nothing, or raise ConnectionError."""
        return self.dock.ended

    @property
    def model_config(self) -> dict[str, Any]:
        """config.json of the model."""
        return dict(self._job.engine.config)

    @property
    def sampling(self) -> Sampling:
        """How responses must be sampled; `take` marks greedy ones."""
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
        1000). Waits for one, at most `deadline` seconds."""
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

        "prompt": its tokens; "oldest", "newest" `[B]`: versions of weights that may sample the row, newest -1: no
        limit; "greedy" `[B]`: always take the most likely token (evaluations); "seed" `[B]`: of this response; its use
        is optional. Raises ValueError for a job with --rl-async-order strict, whose rows are reserved for its own
        engines, for one with tools or environments, which only its own engines have, and for max_rows below 1.
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
        """Give responses to taken rows, to all or some, each once.

        "ids" `[B, 3]`; "response": sampled tokens, with the end token; "logps": log-prob of each token, in nats, under
        the distribution that it was sampled from (greedy: that of temperature 1); "version" `[B]`: of the weights; if
        several versions sampled one response, "segments" `[S, 2]` instead: (first token of the response, version);
        "finish" `[B]`: 0 if an end token or string ended it, 1 if the limit did; default: by the last token. Raises
        ValueError for invalid rows, or rows that were not taken. Rows are written in parts: those of one `take` on one
        machine, at most 64 MiB of cells. Of the part with the error nothing is written, and its rows stay taken: give
        them again, or `release` them. Earlier parts are written.
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
        """Give taken rows without a response back, for other engines."""
        for lease in {lease.token: lease for lease, _ in self._taken.values()}.values():
            self.dock.release(lease)
        self._taken.clear()

    def report(self, counts: Mapping[str, float]) -> None:
        """Report this engine's counts since it joined, for the job's metrics: "seconds", of these "back-pressure" (no
        prompts) and "version" (it waited for weights), "responses" and "tokens". If an engine has reported seconds and
        then is silent for half of --rl-wait-timeout, it counts as hanging: its rows are given to others."""
        self._reported = True
        self.dock.report(counts)

    # a data source

    def offer(self, rows: Iterable[Mapping[str, Any]], deadline: float = 0.0) -> list[int]:
        """Offer prompts for the next rollouts, which take them before those of --rl-prompt-data. A row has the fields
        of a row of the data: prompt (a string, or messages), answer, and others, all as JSON.

        Returns a number below 0 for each row: "row" in the column `meta` of its responses. Waits at most `deadline`
        seconds for room, or until the job has read its checkpoint; each publication of weights admits a rollout. Takes
        all rows or none: raises ValueError for rows that would be wrong in the data too, for a prompt that is too long,
        for more than four rollouts at once, and in a job with --rl-async-order strict; TimeoutError after the deadline.
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
        """Versions that all trainer ranks have now, by rising number."""
        every = [set(source.versions(deadline)) for source in self._sources]
        return sorted(set.intersection(*every))

    def weights(
        self, version: int | None = None, names: Sequence[str] | None = None, deadline: float = 600.0
    ) -> tuple[int, dict[str, Tensor]]:
        """A version (None: the newest), and its complete tensors by Hugging Face names, on the host, in the engine's
        dtype (--rl-engine-dtype): all, or those of `names`. Waits at most `deadline` seconds for the version.

        Raises `mindspeed_rl_plugin.dock.Gone` for a version that newer ones have overwritten.
        """
        end = time.monotonic() + deadline
        while True:
            try:
                left = end - time.monotonic()
                return pull_tensors(self._weights, self._sources, version, names, left)
            except Gone:  # newer ones have overwritten it during the read
                if version is not None:
                    raise

    # an observer

    def finished(self, stage: str = "reward") -> Tensor:
        """`[n, 3]` ids of the rows that a stage has finished and the job still has (until their last optimizer step).
        Rows of an evaluation have a rollout below 0. Raises ValueError for an unknown stage."""
        if stage not in self.stages:
            raise ValueError(f"finished: no stage {stage!r}; this job has {', '.join(sorted(self.stages))}")
        return torch.tensor(self.dock.finished(stage), dtype=torch.int64).reshape(-1, 3)

    def read(self, ids: Ids, columns: Iterable[str]) -> TensorDict:
        """Columns of rows from `finished`. Rows that the job does not have any more, or that lack one of the columns,
        are left out; "ids" has the others."""
        wanted = [SampleId(*i) for i in (ids.tolist() if isinstance(ids, Tensor) else ids)]
        return to_tensordict(self.dock.peek(wanted, tuple(columns)))

    # inside

    def _leased(self, max_rows: int, deadline: float) -> Lease:
        """Lease rows that are ready within the deadline, maybe none."""
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
        """Raise ValueError for a form that cannot be made into rows. The job checks the values."""
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
    """Raise ValueError for a column that differs from `GIVEN`."""
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
