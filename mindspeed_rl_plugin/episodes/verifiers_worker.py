"""The process in which verifiers runs rollouts, in the interpreter that has verifiers.

verifiers has control: its environment runs a rollout and requests each turn of the model at a token-level endpoint
(`POST /inference/v1/generate` with token ids), which this process serves on loopback. A request waits until the
turn that the engine sampled comes through the pipe. The first message is (environment, tokenizer, whether to run the
tokenizer's code); the answer is (version of verifiers, None) or (None, error). Then each message to this process is a
call of a method of `Rollouts`, and each message from it a `verifiers_bridge.RolloutReport`; both come at any time.
"""

from __future__ import annotations

import asyncio
import math
import queue
import signal
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from mindspeed_rl_plugin.episodes.verifiers_load import Loaded, load, task_of
from mindspeed_rl_plugin.workers.child import Parent, describe, exchange, why_not_loaded
from mindspeed_rl_plugin.workers.keeper import keep

CLEAN_UP_SECONDS = 10.0  # for verifiers to clean up after the parent has closed the lifeline or ended
CONVERSATION = "X-Session-ID"  # header of verifiers' requests: the id of a trace (its record of a conversation)


def main(connection: int, lifeline: int) -> None:
    """Run rollouts until the parent closes the connection. Arguments: file descriptors."""
    keep(connection, lifeline, CLEAN_UP_SECONDS)
    parent = Parent(connection, None)
    environment, tokenizer, trusted = parent.receive()
    loaded = parent.load("", load, environment)
    if trusted:
        import renderers.base

        renderers.base.TRUSTED_REVISIONS[tokenizer] = "main"  # run the tokenizer's code; a directory has no revisions
    asyncio.run(_serve(parent, loaded, tokenizer))


async def _serve(parent: Parent, loaded: Loaded, tokenizer: str) -> None:
    out: queue.SimpleQueue = queue.SimpleQueue()
    rollouts, stop = Rollouts(loaded, out.put), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with AsyncExitStack() as stack:
        try:
            client = _client(loaded, await _endpoint(stack, rollouts), tokenizer)
            await _warm(client)
            await stack.enter_async_context(loaded.env.serving())
        except Exception as error:  # noqa: BLE001 - whatever verifiers or its environment raises is reported
            parent.send((None, why_not_loaded(describe(error))))
            return
        rollouts.context = loaded.vf.ModelContext(model="policy", client=client)
        parent.send((loaded.version, None))
        exchange(parent, rollouts, out, stop)
        await stop.wait()
        await rollouts.close()


async def _endpoint(stack: AsyncExitStack, rollouts: Rollouts) -> int:
    """Serve the endpoint. Returns its port."""
    from aiohttp import web

    app = web.Application(client_max_size=0)
    app.router.add_post("/inference/v1/generate", rollouts.generate)
    app.router.add_get("/v1/models", _models)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner.addresses[0][1]


async def _models(_: Any) -> Any:
    """Lists no model, so that verifiers finds no maximum context length: the engine enforces the job's limits."""
    return _answer({"data": []})


def _client(loaded: Loaded, port: int, tokenizer: str) -> Any:
    """Settings of verifiers' training client. api_key_var: a missing variable, so that no key is read."""
    return loaded.vf.TrainClientConfig(
        base_url=f"http://127.0.0.1:{port}/v1",
        api_key_var="MINDSPEED_RL_PLUGIN_HAS_NO_KEY",
        renderer=loaded.renderer,
        renderer_model_name=tokenizer,
    )


async def _warm(client: Any) -> None:
    """Load the tokenizer now, so that its errors are reported at the start; the client uses the loaded tokenizer."""
    from verifiers.v1.clients.train import ElasticRendererPool

    tokenizer = client.renderer_model_name
    try:
        await ElasticRendererPool(tokenizer, client.renderer, multiplex=client.multiplex).grow()
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise ValueError(
            f"the tokenizer {tokenizer!r} cannot render prompts for verifiers: {error}; give one whose chat template "
            "fits, or name a renderer of verifiers (docs/episodes.md)"
        ) from error


class RunningRollout:
    """One rollout. asks: the waiting request for a turn; over: whether no further turn is sampled; since: when the
    model's last turn came, else when the rollout began, on the monotonic clock; trace: of the trained conversation."""

    def __init__(self) -> None:
        self.asks: asyncio.Future | None = None
        self.over, self.since = False, time.monotonic()
        self.trace: Any = None
        self.runs: asyncio.Task | None = None

    def answer(self, turn: tuple[Sequence[int], Sequence[float], bool] | None) -> None:
        """Answer the waiting request, if any, with the model's turn (None: no turn)."""
        self.since = time.monotonic()
        if self.asks is not None and not self.asks.done():
            self.asks.set_result(turn)


class Rollouts:
    """The running rollouts. say: sends a message to the parent; context: model and client of verifiers."""

    context: Any = None

    def __init__(self, loaded: Loaded, say: Any) -> None:
        self._loaded, self._say = loaded, say
        self._rollouts: dict[int, RunningRollout] = {}
        self._traces: dict[str, tuple[int, RunningRollout, Any]] = {}

    def begin(self, number: int, data: dict[str, Any]) -> None:
        rollout = self._rollouts[number] = RunningRollout()
        rollout.runs = asyncio.create_task(self._run(number, rollout, data))

    def act(self, number: int, tokens: Sequence[int], logps: Sequence[float]) -> None:
        """Give a rollout the turn that it waits for."""
        if rollout := self._rollouts.get(number):
            rollout.answer((tokens, logps, True))

    def finish(self, number: int, cut: tuple[Sequence[int], Sequence[float]] | None) -> None:
        """End a rollout without a further turn; verifiers scores it. cut: the awaited turn, if a limit cut it."""
        if rollout := self._rollouts.get(number):
            rollout.over = True
            rollout.answer((*cut, False) if cut else None)

    def end(self, number: int) -> None:
        if rollout := self._rollouts.get(number):
            rollout.runs.cancel()

    async def close(self) -> None:
        runs = [rollout.runs for rollout in self._rollouts.values()]
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)

    async def generate(self, request: Any) -> Any:
        """Handle a request of verifiers' client for a turn of the model."""
        known = self._traces.get(request.headers.get(CONVERSATION, ""))
        if known is None:
            return _answer(_error("no rollout here has this conversation"), 404)
        number, rollout, trace = known
        prompt = (await request.json())["token_ids"]
        if why := _refusal(rollout, trace):
            return _answer(_error(why), 400)
        rollout.trace = trace
        turn = None if rollout.over else await self._turn(number, rollout, prompt)
        if turn is None:  # the trace ends as at a limit of verifiers, and is scored
            trace.stop("max_total_tokens")
            return _answer(_error("the job samples no further turn of this rollout"), 400)
        return _answer(_choice(*turn))

    async def _turn(self, number: int, rollout: RunningRollout, prompt: list[int]) -> Any:
        rollout.asks = asyncio.get_running_loop().create_future()
        # No messages for the first turn: the job's data row has the text of the first prompt.
        messages = [_message(message) for message in rollout.trace.pending] if rollout.trace.nodes else []
        self._tell(number, rollout, prompt=prompt, messages=messages)
        try:
            return await rollout.asks
        finally:
            rollout.asks = None

    async def _run(self, number: int, rollout: RunningRollout, data: dict[str, Any]) -> None:
        try:
            (slot,) = self._loaded.env.slots(task_of(self._loaded, data))
            episode = await self._loaded.env.run_slot(
                slot, self.context, on_trace=lambda trace: self._traces.update({trace.id: (number, rollout, trace)})
            )
            self._tell(number, rollout, **_result(rollout, episode))
        except asyncio.CancelledError:
            self._tell(number, rollout, ended=True)
        except Exception as error:  # noqa: BLE001 - whatever verifiers or its environment raises is reported
            self._tell(number, rollout, failure=describe(error))
        finally:
            rollout.answer(None)  # a request that still waits would delay the end
            del self._rollouts[number]
            self._traces = {key: value for key, value in self._traces.items() if value[0] != number}

    def _tell(self, number: int, rollout: RunningRollout, **what: Any) -> None:
        self._say({"number": number, "seconds": time.monotonic() - rollout.since, **what})


def _refusal(rollout: RunningRollout, trace: Any) -> str | None:
    """Why a request for a turn cannot be answered."""
    if rollout.trace is not None and rollout.trace is not trace:
        return (
            f"the rollout asks for a turn in a second conversation, of agent {trace.agent.name!r}; only the "
            f"conversation of agent {rollout.trace.agent.name!r} is trained: give other agents their "
            "own client and model, and turn retries off"
        )
    return None if rollout.asks is None else "the rollout asks for two turns at once; it must wait for the first"


def _result(rollout: RunningRollout, episode: Any) -> dict[str, Any]:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        return {"failure": "; ".join(f"raised {error.type}: {error.message}" for error in errors) or "failed"}
    if rollout.trace is None:
        return {"failure": "ended before it asked for a turn of the model"}
    if not math.isfinite(reward := rollout.trace.reward):
        return {"failure": f"has the reward {reward}, which is no finite number"}
    return {"done": True, "reward": reward}


def _choice(tokens: Sequence[int], logps: Sequence[float], whole: bool) -> dict[str, Any]:
    """A turn in the form of vLLM's endpoint."""
    content = [{"token": f"token_id:{token}", "logprob": p} for token, p in zip(tokens, logps, strict=True)]
    reason = "stop" if whole else "length"
    choice = {"index": 0, "token_ids": tokens, "logprobs": {"content": content}, "finish_reason": reason}
    return {"request_id": "", "choices": [choice]}


def _message(message: Any) -> dict[str, str]:
    content = (
        message.content
        if isinstance(message.content, str)
        else "".join(getattr(part, "text", "") for part in message.content or ())
    )
    name = getattr(message, "name", None)
    return {"role": message.role, "content": content, **({"name": name} if name else {})}


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error"}}


def _answer(body: Any, status: int = 200) -> Any:
    from aiohttp import web

    return web.json_response(body, status=status)
