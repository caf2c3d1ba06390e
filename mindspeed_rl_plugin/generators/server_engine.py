"""vLLM's own server as an engine of one process: `ServerEngine` sends prompts and gets responses by HTTP;
`ServerWeights` lets the server's workers pull published weights.

Each response is one request to the server, in a separate thread. The server returns the tokens, their log-probs, and
which weights sampled which tokens.
"""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindspeed_rl_plugin.dock import Gone
from mindspeed_rl_plugin.engine.options import prompt_of, sampling_fields
from mindspeed_rl_plugin.engine.routes import ROUTES, RouteSizes, column_of, continued, routes_of
from mindspeed_rl_plugin.generators.vllm_server import ASK_SECONDS, GENERATE_PATH, VllmServer
from mindspeed_rl_plugin.rows import Column, Completion, GenerateRequest, Ragged, SampleId
from mindspeed_rl_plugin.weights.pull import Applied, Pulled

ABORT_AGAIN_SECONDS = 0.2  # between two aborts; the second is for requests that came after the first
NO_LOGP = -9999.0  # sent by the server instead of a log-prob that is not finite
PULL_LOOK_SECONDS = 0.1  # between two questions whether a pull has ended
STAY_SECONDS = 5.0  # between two signs of life; after `server_worker.HELD_SECONDS` without one the server is free
SERVER_ERRORS = (ConnectionError, RuntimeError, TimeoutError, ValueError)  # of a server that is lost, or that refuses


class ServerEngine:
    """The part of `Engine` that `EngineLoop` needs, on top of a server that works only for this job.

    eos: ids that end every response that does not ignore them; seeds: whether each request has its own seed; routes:
    of the model if responses have routes.
    """

    replica, replicas, leader, shares_experts = 0, 1, True, False

    def __init__(self, server: VllmServer, eos: Sequence[int], seeds: bool, routes: RouteSizes | None = None) -> None:
        self.server, self._eos, self._seeds, self._routes = server, tuple(eos), seeds, routes
        self.version, self.progress = -1, time.monotonic()
        self.digest: str | None = None
        self._changes = 0  # how often the weights have changed
        self._salt = secrets.token_hex(8)  # random, so that no prefix is used that the server cached for another job
        self._running: set[SampleId] = set()
        self._done: queue.SimpleQueue[Completion | Exception] = queue.SimpleQueue()

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        for request in requests:
            self._running.add(request.id)
            given = request, self.version, self._changes
            threading.Thread(target=self._sample, args=given, daemon=True, name="response").start()

    def poll(self, timeout: float) -> list[Completion]:
        """Wait for a response; see `Engine`. Raises the server's error if there is one."""
        finished = self._arrived(timeout) if self._running else []
        self.progress = time.monotonic() if finished else self.progress
        for completion in finished:
            self._running.remove(completion.id)
            if completion.finish == "abort":
                raise RuntimeError(
                    f"the server at {self.server.url} aborted response {tuple(completion.id)}, but this job did not "
                    "ask for it; let no other program use the server"
                )
        return finished

    def abort(self) -> list[Completion]:
        """Abort all responses, and pause the server until it has new weights. Returns the aborted responses; the next
        `poll` returns those that had ended before."""
        stopped, end = list[Completion](), time.monotonic() + self.server.deadline
        while len(stopped) < len(self._running):
            self.server.ask("/pause?mode=abort&clear_cache=false")
            stopped += self._arrived(ABORT_AGAIN_SECONDS)
            if time.monotonic() > end:
                raise TimeoutError(
                    f"the server at {self.server.url} did not abort all of {len(self._running)} responses within "
                    f"{self.server.deadline:g} s"
                )
        for completion in stopped:
            if completion.finish == "abort":
                self._running.remove(completion.id)
            else:
                self._done.put(completion)
        return [completion for completion in stopped if completion.finish == "abort"]

    def parameters(self) -> Mapping[str, Tensor]:
        """Empty: the server's own workers write the weights."""
        return {}

    def update_weights(self, version: int, digest: str | None = None, *, in_flight: bool = False) -> None:
        """Let the paused server continue, now with the weights of `version`."""
        self.server.ask("/resume")
        self.version, self.digest, self._changes = version, digest, self._changes + 1

    def shutdown(self) -> None:
        """See `Engine`. The server continues to run, for the next job."""

    def lose(self, error: Exception) -> None:
        """Note that the server is lost: `poll` raises `error`."""
        self._done.put(error)

    def _arrived(self, timeout: float) -> list[Completion]:
        """The responses that have arrived; waits for the first one. Raises the error of a request."""
        out: list[Completion] = []
        with contextlib.suppress(queue.Empty):
            while True:
                done = self._done.get(timeout=0 if out else timeout)
                if isinstance(done, Exception):
                    raise done
                out.append(done)
        return out

    def _sample(self, request: GenerateRequest, version: int, changes: int) -> None:
        try:
            body = {
                "token_ids": prompt_of(request),
                "sampling_params": sampling_fields(request, self._eos, self._seeds),
                "cache_salt": f"{self._salt} {changes}",  # so no prefix is used that older weights have computed
            }
            answer = self.server.ask(GENERATE_PATH, body, seconds=self.server.deadline)
            self._done.put(completion(request, answer["choices"][0], version, self._routes))
        except TimeoutError as error:
            self._done.put(TimeoutError(f"{error} (--rl-wait-timeout); raise it, or lower --rl-max-response-length"))
        except Exception as error:  # noqa: BLE001 - raised in the main thread, which would else wait for ever
            self._done.put(error)


def completion(
    request: GenerateRequest, choice: Mapping[str, Any], asked: int, routes: RouteSizes | None = None
) -> Completion:
    """A response, with the part that was sampled before an interruption. choice: of the server's answer; asked: version
    of the server's weights at the request; routes: of the model if the response has routes. Raises RuntimeError for a
    response that cannot be trained on."""
    begun = request.begun or Completion(request.id, (), (), "abort", ())
    tokens, entries = choice["token_ids"] or [], (choice["logprobs"] or {}).get("content") or []
    who = f"response {tuple(request.id)} of the server"
    if [entry["token_id"] for entry in entries] != tokens:
        raise RuntimeError(f"{who}: {len(tokens)} tokens, and {len(entries)} log-probs that are not theirs")
    logps = [entry["logprob"] for entry in entries]
    if any(logp <= NO_LOGP for logp in logps):
        raise RuntimeError(f"{who} has a log-prob that is not finite; did the server get the job's weights?")
    if choice["finish_reason"] not in ("stop", "length", "abort"):
        raise RuntimeError(f"{who} ended with {choice['finish_reason']!r}")
    spans = [span for span in choice["weight_versions"] or () if span["end"] > span["start"]]
    if tokens and (not spans or (spans[0]["start"], spans[-1]["end"]) != (0, len(tokens))):
        raise RuntimeError(f"{who} does not say which weights sampled its tokens")
    for span in spans:
        if not span["version"].isdecimal():
            raise RuntimeError(
                f"{who} was sampled by weights with label {span['version']!r}: the server has other clients"
            )
    first = len(begun.tokens)
    parts = [*(begun.segments if begun.tokens else ()), *((first + s["start"], int(s["version"])) for s in spans)]
    merged = [next(same) for _, same in itertools.groupby(parts, key=lambda part: part[1])]
    return Completion(
        request.id,
        (*begun.tokens, *tokens),
        (*begun.logps, *logps),
        choice["finish_reason"],
        tuple(merged) or ((0, asked),),
        columns=_routed(request, choice, len(tokens), routes, who) if routes and tokens else begun.columns,
    )


def _routed(
    request: GenerateRequest, choice: Mapping[str, Any], tokens: int, sizes: RouteSizes, who: str
) -> dict[str, Column]:
    """The column of routes. The server sends an array [tokens - 1, all layers, k] as base64 of a .npy file, with zeros
    for layers without experts, for aborted responses too (vLLM 0.32, scale_out/token_in_token_out/protocol.py and
    v1/engine/output_processor.py)."""
    text, length = choice.get("routed_experts"), len(prompt_of(request)) + tokens
    array = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False) if text else np.empty((0, 0, 0))
    if len(array) != length - 1 or array.shape[1] <= sizes.layers[-1] or array.shape[2] != sizes.k:
        raise RuntimeError(
            f"{who} has routes of {[*array.shape]} [tokens, layers, experts a token], not of [{length - 1}, over "
            f"{sizes.layers[-1]}, {sizes.k}]; start the server with --enable-return-routed-experts"
        )
    rows = torch.from_numpy(array[:, list(sizes.layers)].astype(np.int16)).to(sizes.dtype)
    return {ROUTES: Ragged.from_rows([continued(routes_of(request.begun), column_of(rows, who))])}


class ServerWeights:
    """The part of `Puller` that `EngineLoop` needs.

    address, secret: of the job's dock, which each worker joins.
    machines: of the workers, in their order.
    lost: called in a thread if the server gets another client, or is silent for half of the deadline.
    Raises ValueError if the server has a client already, or if a worker cannot get the job's weights.
    """

    def __init__(
        self,
        server: VllmServer,
        address: str,
        secret: bytes,
        machines: list[str],
        lost: Callable[[Exception], None],
    ) -> None:
        self.server, self._client, self._lost = server, secrets.token_hex(8), lost
        try:
            self._workers("join", None, address=address, secret=secret.hex(), machines=machines)
        except BaseException:
            with contextlib.suppress(*SERVER_ERRORS):  # workers that have not joined refuse
                self._workers("leave", ASK_SECONDS)
            raise
        self._closing, self._heard = threading.Event(), time.monotonic()
        threading.Thread(target=self._stay, daemon=True, name="stay").start()

    def pull(self, version: int) -> Pulled:
        """Let the workers pull a version during the server's steps. Raises Gone, or the error of a worker."""
        began = time.monotonic()
        self._workers("pull", ASK_SECONDS, version=version)
        while any(one["busy"] for one in self._workers("pulled", ASK_SECONDS)):
            time.sleep(PULL_LOOK_SECONDS)
        pulled = self._workers("pulled", ASK_SECONDS)
        if (newest := max(one["newest"] for one in pulled)) >= 0:
            raise Gone(version, newest)
        return Pulled(version, time.monotonic() - began, sum(one["nbytes"] for one in pulled))

    def apply(self, parameters: Mapping[str, Tensor]) -> Applied:
        """Pause the server between two steps; it keeps unfinished responses. Then write the pulled weights.
        `ServerEngine.update_weights` lets it continue."""
        began = time.monotonic()
        self.server.ask("/pause?mode=keep&clear_cache=false")
        applied = self._workers("apply")[0]
        self.server.ask("/update_weight_version", {"new_version": str(applied["version"])})
        return Applied(applied["version"], time.monotonic() - began, applied["digest"])

    def close(self) -> None:
        """Let the workers leave the job, so that the server is free for another job. A server that has ended is no
        error. A server that was silent gets a shorter wait, since others get its rows only after it."""
        self._closing.set()
        patience = max(ASK_SECONDS - (time.monotonic() - self._heard), STAY_SECONDS)
        with contextlib.suppress(*SERVER_ERRORS):
            self._workers("leave", patience)
            self.server.ask("/resume", seconds=patience)

    def _stay(self) -> None:
        """Send signs of life to the server. A server that does not answer counts as lost after half of the job's
        deadline, so before its responses are late."""
        while not self._closing.wait(STAY_SECONDS):
            try:
                self._workers("stay", ASK_SECONDS)
                self._heard = time.monotonic()
            except SERVER_ERRORS as error:
                if isinstance(error, ValueError) or time.monotonic() - self._heard > self.server.deadline / 2:
                    self._lost(error)
                    return

    def _workers(self, name: str, seconds: float | None = None, **arguments: Any) -> list[Any]:
        return self.server.workers(name, seconds, client=self._client, **arguments)
