"""vLLM's own server, as `vllm serve` starts it: its routes, and whether it can generate for a job.

The server's workers have our extension (`server_worker`), which pulls weights and reports how the server was started.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import mindspeed_rl_plugin
from mindspeed_rl_plugin.engine.hf_config import compare_configs
from mindspeed_rl_plugin.engine.options import PROCESSED, VllmOptions

EXTENSION = f"{__package__}.server_worker.ServerWorker"
GENERATE_PATH = "/inference/v1/generate"  # token ids in, token ids out, with log-probs and the version of each token
# vLLM has these routes only with VLLM_SERVER_DEV_MODE=1.
DEVELOPMENT = ("/collective_rpc", "/pause", "/resume", "/server_info")
VERSIONS = "/update_weight_version"  # since vLLM 0.32
ASK_SECONDS = 60.0  # for the answer to a request that costs little work
ERROR_CHARACTERS = 500  # most characters of an answer that an error shows


@dataclass(frozen=True)
class Served:
    """A worker's report about itself and about how the server was started."""

    machine: str  # its name
    plugin: str  # version of this package there
    config: Mapping[str, Any]  # of the model, as transformers reads it
    dtype: str  # of the weights
    logprobs_mode: str  # as vLLM calls it
    max_model_len: int  # most tokens of prompt and response
    max_running: int  # most responses at once
    tokenizer: bool  # whether the server has one
    seeds: bool  # whether a request may have its own seed at no cost
    pipeline: int  # pipeline parallel size
    replicas: int  # data parallel size
    routes: bool = False  # whether responses come with the experts of each token
    held: str = ""  # why the server is not free, with the job that uses it; "": it is free


class VllmServer:
    """A server's routes as calls.

    url: of the server, http://HOST:PORT; deadline: most seconds for any work of the server. Each call raises
    ConnectionError if no server answers, TimeoutError if the answer takes too long, and RuntimeError with the server's
    message if the server reports an error.
    """

    def __init__(self, url: str, deadline: float) -> None:
        parts = urlsplit(url)
        try:
            known = parts.scheme in ("http", "https") and parts.hostname and not (parts.query or parts.username)
            self._place = (parts.hostname, parts.port) if known else None
        except ValueError:  # a wrong port
            self._place = None
        if self._place is None:
            raise ValueError(f"--rl-engine-url {url!r} is no address of a server; give one such as http://HOST:8000")
        self.url, self.deadline = url.rstrip("/"), deadline
        self._secure, self._prefix = parts.scheme == "https", parts.path.rstrip("/")

    def ask(self, path: str, body: Any = None, *, method: str = "POST", seconds: float | None = None) -> Any:
        """The answer of a route, a JSON value. seconds: to wait for the answer; None: half of the deadline, so that the
        rows of a hanging server are given to another engine before the job's deadline."""
        seconds = self.deadline / 2 if seconds is None else seconds
        status, text = self._exchange(method, path, body, seconds)
        if status == http.client.UNAUTHORIZED:
            raise RuntimeError(f"the server at {self.url} wants an API key: start it without --api-key")
        if status != http.client.OK:
            raise RuntimeError(f"{self.url}{path} answered {status}: {text[:ERROR_CHARACTERS]}")
        return json.loads(text) if text else None

    def workers(self, name: str, seconds: float | None = None, **arguments: Any) -> list[Any]:
        """The results of a method of our extension in each worker, in the order of the workers. Raises ValueError with
        the text of a worker that refuses."""
        body = {"method": f"rl_{name}", "kwargs": arguments}
        answers = self.ask("/collective_rpc", body, seconds=seconds)["results"]
        for answer in answers:
            if answer["refused"]:
                raise ValueError(f"{self.url}: {answer['refused']}")
        return [answer["value"] for answer in answers]

    def check(self) -> list[Served]:
        """The reports of the workers. Raises ValueError if the server lacks something that a job needs."""
        routes = self.ask("/openapi.json", method="GET", seconds=ASK_SECONDS)["paths"]
        if missing := ", ".join(path for path in DEVELOPMENT if path not in routes):
            raise ValueError(f"the server at {self.url} has no {missing}: start it with VLLM_SERVER_DEV_MODE=1")
        if VERSIONS not in routes:
            version = self.ask("/version", method="GET", seconds=ASK_SECONDS)["version"]
            raise ValueError(
                f"the server at {self.url}, vLLM {version}, has no {VERSIONS}, without which responses do not say "
                "which weights sampled them; use vLLM 0.32"
            )
        if GENERATE_PATH not in routes:
            raise ValueError(f"the server at {self.url} has no {GENERATE_PATH}: start it with --enable-scale-out")
        # Ask this before calling workers: if a called method is missing, later calls get that call's answers.
        info = self.ask("/server_info?config_format=json", method="GET", seconds=ASK_SECONDS)
        if (extension := info["vllm_config"]["parallel_config"]["worker_extension_cls"]) != EXTENSION:
            has = f"the extension {extension}" if extension else "no extension"
            raise ValueError(
                f"the workers of the server at {self.url} have {has}; start it with --worker-extension-cls {EXTENSION}"
            )
        workers = self.workers("about", ASK_SECONDS)
        if any(about.keys() != Served.__dataclass_fields__.keys() for about in workers):
            raise ValueError(
                f"the server at {self.url} runs mindspeed_rl_plugin {workers[0].get('plugin')}, which reports other "
                f"fields than the job's version {mindspeed_rl_plugin.__version__}; install the job's version"
            )
        return [Served(**about) for about in workers]

    def _exchange(self, method: str, path: str, body: Any, seconds: float) -> tuple[int, str]:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        more = {"context": ssl.create_default_context()} if self._secure else {}
        connection = kind(*self._place, timeout=max(seconds, 0.001), **more)
        given = {} if body is None else {"body": json.dumps(body), "headers": {"Content-Type": "application/json"}}
        try:
            connection.request(method, self._prefix + path, **given)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        except TimeoutError as error:
            raise TimeoutError(f"the server at {self.url} did not answer {path} within {seconds:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            where = f"{self.url}{path} ({error})"
            raise ConnectionError(f"no server answers at {where}; is `vllm serve` running?") from error
        finally:
            connection.close()


def problems(served: Served, job: VllmOptions, stops: bool) -> Iterator[str]:
    """Why a server cannot generate for a job: the value, the limit, and the option to start it with. job: options of
    engines that the job builds (config empty: not known yet); stops: whether strings end responses."""
    if served.held:
        yield served.held
    if served.plugin != mindspeed_rl_plugin.__version__:
        ours = mindspeed_rl_plugin.__version__
        yield f"it runs mindspeed_rl_plugin {served.plugin}, the job runs {ours}; install the job's version"
    if served.logprobs_mode != PROCESSED:
        yield (
            f"its log-probs are {served.logprobs_mode}, not those of the distribution that it samples from; start it "
            f"with --logprobs-mode {PROCESSED}"
        )
    if served.max_model_len < job.max_model_len:
        yield (
            f"it takes {served.max_model_len} tokens of prompt and response, the job needs up to {job.max_model_len}; "
            f"start it with --max-model-len {job.max_model_len}"
        )
    if served.dtype != job.dtype:
        yield (
            f"its weights are {served.dtype}, the job's {job.dtype} (--rl-engine-dtype); start it with --dtype "
            f"{job.dtype}"
        )
    if job.record_routes and not served.routes:
        yield "its responses do not say which experts they used; start it with --enable-return-routed-experts"
    if stops and not served.tokenizer:
        yield "--rl-stop needs text, but the server has no tokenizer; start it without --skip-tokenizer-init"
    for size, flag in ((served.pipeline, "--pipeline-parallel-size"), (served.replicas, "--data-parallel-size")):
        if size > 1:
            yield f"it has {flag} {size}; start one server for each engine, with tensor parallelism, and give all URLs"
    if job.config and (differ := compare_configs(job.config, served.config)):
        yield "it serves another model: " + "; ".join(differ)


def check_served(url: str, served: Served, job: VllmOptions, stops: bool) -> None:
    if found := list(problems(served, job, stops)):
        raise ValueError(f"the server at {url} cannot generate for this job:\n  " + "\n  ".join(found))
