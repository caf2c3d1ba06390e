"""A server as an engine: what it is asked, what its answers become, and which servers are refused. The server here
speaks HTTP as vLLM's does, and samples nothing."""

import asyncio
import base64
import contextlib
import io
import json
import re
import socket
import threading
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch

import mindspeed_rl_plugin
from mindspeed_rl_plugin.engine.options import VllmOptions, prompt_of, sampling_fields
from mindspeed_rl_plugin.engine.routes import RouteSizes
from mindspeed_rl_plugin.generators.server_engine import ServerEngine, completion
from mindspeed_rl_plugin.generators.vllm_server import (
    DEVELOPMENT,
    EXTENSION,
    GENERATE_PATH,
    VERSIONS,
    Served,
    VllmServer,
    check_served,
    problems,
)
from mindspeed_rl_plugin.rows import Completion, GenerateRequest, SampleId, Sampling

ALL = (*DEVELOPMENT, VERSIONS, GENERATE_PATH)
SERVED = Served(
    "m", mindspeed_rl_plugin.__version__, {}, "float32", "processed_logprobs", 24, 8, True, True, 1, 1, True, ""
)
JOB = VllmOptions({}, max_model_len=24)
ID = SampleId(1, 2, 3)


def choice(tokens, versions, finish="stop", logp=-0.5):
    """As a server answers. versions: (version, start, end)."""
    return {
        "token_ids": tokens,
        "logprobs": {"content": [{"token_id": token, "logprob": logp} for token in tokens]},
        "finish_reason": finish,
        "weight_versions": [{"version": v, "start": a, "end": b} for v, a, b in versions],
    }


class Fake:
    """routes: that it shows; extension: of its workers; held: prompts whose responses wait for an abort; status: of its
    answers to a request for tokens; more: what a worker says besides `Served`. asked: (path, body) in their order."""

    def __init__(self) -> None:
        self.routes, self.extension, self.status, self.version = ALL, EXTENSION, 200, "default"
        self.held: set[int] = set()
        self.more: dict[str, object] = {}
        self.asked: list[tuple[str, object]] = []
        self._paused = threading.Event()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer(200, fake.get(self.path))

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
                fake.asked.append((self.path, body))
                self.answer(*fake.post(self.path, body))

            def answer(self, status, value):
                text = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                with contextlib.suppress(BrokenPipeError):
                    self.wfile.write(text)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def get(self, path):
        if path == "/openapi.json":
            return {"paths": dict.fromkeys(self.routes)}
        return {"version": "0.31.0", "vllm_config": {"parallel_config": {"worker_extension_cls": self.extension}}}

    def post(self, path, body):
        path = urlsplit(path)
        if path.path == "/pause" and "mode=abort" in path.query:
            self._paused.set()
        if path.path == "/collective_rpc":
            refused = "" if body["method"] == "rl_about" else "it generates for another job"
            return 200, {"results": [{"value": asdict(SERVED) | self.more, "refused": refused}]}
        if path.path == GENERATE_PATH:
            if self.status != 200:
                return self.status, {"error": "engine core is dead"}
            prompt = body["token_ids"]
            if prompt[0] in self.held and self._paused.wait(20):
                return 200, {"choices": [choice([7], [(self.version, 0, 1)], "abort")]}
            return 200, {"choices": [choice([t + 1 for t in prompt], [(self.version, 0, len(prompt))])]}
        if path.path == VERSIONS:
            self.version = body["new_version"]
        return 200, {}


@pytest.fixture
def fake():
    server = Fake()
    yield server
    server.http.shutdown()
    server.http.server_close()


def request(prompt, group=0, begun=None, **sampling):
    return GenerateRequest(SampleId(0, group, 0), prompt, Sampling(8, **sampling), seed=5, begun=begun)


def engine_of(fake) -> ServerEngine:
    engine = ServerEngine(VllmServer(fake.url, 20), (96,), seeds=True)
    fake.post(VERSIONS, {"new_version": "4"})
    engine.update_weights(4)
    return engine


def polled(engine, count):
    out = []
    while len(out) < count:
        assert (more := engine.poll(20)), "nothing came"
        out += more
    return sorted(out, key=lambda completion: completion.id)


def test_responses_come_back_exactly(fake):
    engine = engine_of(fake)
    engine.submit([request((1, 2, 3)), request((5,), group=1, temperature=0.5, top_p=0.9, top_k=3)])
    first, second = polled(engine, 2)
    assert first == Completion(SampleId(0, 0, 0), (2, 3, 4), (-0.5,) * 3, "stop", ((0, 4),))
    assert second.tokens == (6,) and engine.poll(0.01) == []
    bodies = {tuple(body["token_ids"]): body for path, body in fake.asked if path == GENERATE_PATH}
    params = bodies[5,]["sampling_params"]
    assert (params["temperature"], params["top_p"], params["top_k"], params["seed"]) == (0.5, 0.9, 3, 5)
    assert params["logprobs"] == 0 and params["ignore_eos"] and params["stop_token_ids"] == [96]
    salts = {body["cache_salt"] for body in bodies.values()}
    engine.update_weights(5)
    engine.submit([request((9,), group=2)])
    engine.poll(20)
    assert len(salts) == 1 and fake.asked[-1][1]["cache_salt"] not in salts, "prefixes of older weights would serve"


def test_abort_gives_back_what_is_begun_and_keeps_what_has_ended(fake):
    fake.held = {1}
    engine = engine_of(fake)
    engine.submit([request((1,)), request((2,), group=1)])
    (begun,) = engine.abort()
    assert (begun.id.group, begun.tokens, begun.finish) == (0, (7,), "abort")
    (ended,) = polled(engine, 1)
    assert (ended.id.group, ended.finish) == (1, "stop")
    fake.held = set()
    fake.version = "6"
    engine.update_weights(6)
    engine.submit([request((1,), begun=replace(begun, logps=(-0.25,)))])
    (whole,) = polled(engine, 1)
    assert whole.tokens == (7, 2, 8) and whole.segments == ((0, 4), (1, 6)) and whole.logps == (-0.25, -0.5, -0.5)
    assert fake.asked[-1][1]["sampling_params"]["max_tokens"] == 7


def sent(rows) -> str:
    """An array as the server sends it."""
    file = io.BytesIO()
    np.save(file, np.array(rows, dtype=np.uint8))
    return base64.b64encode(file.getvalue()).decode()


def test_routes_are_of_the_layers_with_experts_and_lie_behind_their_token():
    sizes, asked = RouteSizes((1, 2), 8, 2), request((5, 6))
    rows = [[[0, 0], [t, t + 1], [t + 2, t + 3]] for t in range(3)]
    answer = choice([7, 8], [("4", 0, 2)]) | {"routed_experts": sent(rows)}
    column = completion(asked, answer, 4, sizes).columns["routes"]
    expected = [[[0, 0]] * 2, *([[t, t + 1], [t + 2, t + 3]] for t in range(3))]
    assert len(column) == 1 and column.row(0).tolist() == expected and column.values.dtype == torch.uint8
    assert completion(asked, answer, 4).columns == {}
    wrong = {"[0, 0, 0]": None, "[2, 3, 2]": sent(rows[:2]), "[3, 2, 2]": sent(np.array(rows)[:, :2])}
    wrong |= {"twice": sent(np.zeros((3, 3, 2)))}
    for text, value in wrong.items():
        with pytest.raises(RuntimeError, match=re.escape(text)):
            completion(asked, answer | {"routed_experts": value}, 4, sizes)


def answered(body, tokens, finish) -> dict:
    """The choice that vLLM's own server sends if its engine samples these tokens one by one, and then aborts it or
    not."""
    from vllm.entrypoints.scale_out.token_in_token_out import protocol, serving
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
    from vllm.v1.outputs import LogprobsLists

    asked = protocol.GenerateRequest(**json.loads(json.dumps(body)))
    asked.sampling_params.output_kind = kind = serving.RequestOutputKind.FINAL_ONLY
    waiting, out, done = RequestOutputCollector(kind, "a"), OutputProcessor(None, log_stats=False), 0
    given = "a", asked.token_ids, None, asked.sampling_params, None, 0.0, None, None, None
    out.add_request(EngineCoreRequest(*given, external_req_id="a"), None, queue=waiting)
    steps = [EngineCoreOutput("a", [t], LogprobsLists(*map(np.array, ([[t]], [[-0.5]], [1])))) for t in tokens]
    for read, step in enumerate(steps, len(asked.token_ids)):  # rows of three layers
        step.routed_experts = (np.arange(done, read)[:, None, None] + np.arange(6).reshape(3, 2)).astype(np.uint8)
        done = read
    steps += [EngineCoreOutput("a", [])] if finish == "abort" else []  # as `_send_abort_outputs` says it
    steps[-1].finish_reason = FinishReason[finish.upper()]
    for step in steps:
        out.process_outputs([step], weight_version="4")

    async def results():
        yield await waiting.get()

    server = object.__new__(serving.ServingTokens)
    vars(server).update(enable_prompt_tokens_details=False, enable_log_outputs=False, has_tokenizer=False)
    asked._response_mm_placeholders = None
    whole = asyncio.run(server.serve_tokens_full_generator(asked, results(), "a", "m", SimpleNamespace()))
    return json.loads(json.dumps(whole.model_dump()))["choices"][0]


@pytest.mark.slow  # vLLM's server is imported
def test_answers_of_vllms_own_code_are_read():
    """Also of a response that is aborted, goes on, and is then aborted before it has a token."""
    begun = None
    for tokens, finish in (([7, 8], "abort"), ([], "abort"), ([9, 10], "stop")):
        asked = request((5, 6), begun=begun)
        body = {"token_ids": prompt_of(asked), "sampling_params": sampling_fields(asked, (96,), True)}
        begun = completion(asked, answered(body, tokens, finish), 4, RouteSizes((1, 2), 99, 2))
        rows = [[[t + 2, t + 3], [t + 4, t + 5]] for t in range(1 + len(begun.tokens))]
        assert begun.columns["routes"].row(0).tolist() == [[[0, 0]] * 2, *rows] and begun.finish == finish
    assert (begun.tokens, begun.logps, begun.segments) == ((7, 8, 9, 10), (-0.5,) * 4, ((0, 4),))


def test_an_abort_that_nobody_asked_for_and_errors_are_raised(fake):
    fake.held = {1}
    engine = engine_of(fake)
    engine.submit([request((1,))])
    fake._paused.set()
    with pytest.raises(RuntimeError, match="this job did not ask for it"):
        engine.poll(20)
    fake.status = 500
    engine.submit([request((2,))])
    with pytest.raises(RuntimeError, match=rf"{GENERATE_PATH} answered 500.*engine core is dead"):
        engine.poll(20)
    fake.http.shutdown()
    fake.http.server_close()
    engine.submit([request((3,))])
    with pytest.raises(ConnectionError, match="no server answers"):
        engine.poll(20)


def test_one_that_stands_still_has_half_of_the_deadline_but_for_tokens():
    """Its machine takes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as still:
        engine = ServerEngine(VllmServer(f"http://127.0.0.1:{still.getsockname()[1]}", 0.4), (96,), seeds=True)
        with pytest.raises(TimeoutError, match=r"did not answer /resume within 0\.2 s"):
            engine.update_weights(4)
        engine.submit([request((1,))])
        with pytest.raises(TimeoutError, match=rf"{GENERATE_PATH} within 0\.4 s \(--rl-wait-timeout\)"):
            engine.poll(20)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (choice([1, 2], [("4", 0, 2)]) | {"logprobs": None}, "2 tokens, and 0 log-probs"),
        (choice([1, 2], [("4", 0, 2)]) | {"token_ids": [1, 3]}, "2 tokens, and 2 log-probs"),
        (choice([1], [("4", 0, 1)], logp=-9999.0), "not finite"),
        (choice([1], [("default", 0, 1)]), "has other clients"),
        (choice([1, 2], [("4", 0, 1)]), "does not say which weights"),
        (choice([1], []) | {"weight_versions": None}, "does not say which weights"),
        (choice([1], [("4", 0, 1)], "error"), "ended with 'error'"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(answer, why):
    with pytest.raises(RuntimeError, match=why):
        completion(request((1,)), answer, 4)


def test_versions_of_parts_join():
    begun = Completion(ID, (1, 2), (-1.0, -1.0), "abort", ((0, 3), (1, 4)))
    whole = completion(replace(request((9,)), id=ID, begun=begun), choice([5, 6], [("4", 0, 1), ("6", 1, 2)]), 4)
    assert whole.segments == ((0, 3), (1, 4), (3, 6)) and whole.version == 3
    assert completion(request((9,)), choice([], [], "abort"), 4).segments == ((0, 4),)


def test_a_server_that_fits_says_what_it_is_and_what_its_workers_refuse(fake):
    server = VllmServer(fake.url + "/", 20)
    assert server.check() == [SERVED]
    with pytest.raises(ValueError, match=f"{fake.url}: it generates for another job"):
        server.workers("join", address="a:1")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"routes": (VERSIONS, GENERATE_PATH)}, "has no /collective_rpc, .*: start it with VLLM_SERVER_DEV_MODE=1"),
        ({"routes": (*DEVELOPMENT, GENERATE_PATH)}, rf"vLLM 0.31.0, has no {VERSIONS}.*use vLLM 0.32"),
        ({"routes": (*DEVELOPMENT, VERSIONS)}, "start it with --enable-scale-out"),
        ({"extension": ""}, f"have no extension; start it with --worker-extension-cls {EXTENSION}"),
        ({"extension": "a.B"}, "have the extension a.B; start it with"),
        ({"more": {"unknown": 1}}, f"runs mindspeed_rl_plugin {SERVED.plugin}, .*; install the job's version"),
    ],
)
def test_a_server_that_lacks_something_is_refused(fake, change, why):
    vars(fake).update(change)
    with pytest.raises(ValueError, match=why):
        VllmServer(fake.url, 20).check()
    assert (fake.asked == []) != ("more" in change), "such a server is only looked at"


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://a:1", "http://", "http://a:b", "http://a:1/v1?x=2"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ValueError, match="is no address of a server"):
        VllmServer(url, 20)


QWEN = {"model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 97}


@pytest.mark.parametrize(
    ("served", "why"),
    [
        ({"held": "it generates for the job at h:1"}, "it generates for the job at h:1"),
        ({"plugin": "0"}, "it runs mindspeed_rl_plugin 0"),
        ({"logprobs_mode": "raw_logprobs"}, "start it with --logprobs-mode processed_logprobs"),
        ({"max_model_len": 23}, "takes 23 tokens .* up to 24; start it with --max-model-len 24"),
        ({"dtype": "bfloat16"}, "start it with --dtype float32"),
        ({"tokenizer": False}, "start it without --skip-tokenizer-init"),
        ({"routes": False}, "start it with --enable-return-routed-experts"),
        ({"pipeline": 2}, "--pipeline-parallel-size 2"),
        ({"replicas": 2}, "--data-parallel-size 2"),
        ({"config": {**QWEN, "rms_norm_eps": 1e-6}}, "another model: rms_norm_eps: Megatron"),
        ({"config": {**QWEN, "vocab_size": 98}}, "vocab_size: Megatron 97, Hugging Face 98"),
    ],
)
def test_a_server_that_was_started_otherwise_is_refused(served, why):
    fits, job = replace(SERVED, config=QWEN), replace(JOB, config=QWEN, record_routes=True)
    check_served("http://a:1", fits, job, stops=True)
    with pytest.raises(ValueError, match=why):
        check_served("http://a:1", replace(fits, **served), job, stops=True)


def test_the_configs_of_transformers_are_compared_as_those_of_files():
    from transformers import AutoConfig

    there = json.loads(json.dumps(AutoConfig.for_model(**QWEN).to_dict(), default=str))
    job = replace(JOB, config={**there, "rope_theta": 10000.0} | {"rope_parameters": None})
    assert [*problems(replace(SERVED, config=there), job, False)] == []
