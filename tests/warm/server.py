"""Processes that begin with torch, Megatron and vLLM imported: forks of this one.

Four fifths of a short job are imports. A test whose subject is not the start of a process gets its ranks from here,
through the stand-in for `python` that `client.py` is; the plugin's own modules, all but host mode and the hooks, are
imported by each fork. Arguments: the address of the socket; modules to import, in the place of `PRELOADED`.
"""

import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import tempfile
from types import ModuleType

from client import REWARD

PRELOADED = """
    mindspeed_rl_plugin.adaptor torch.distributed.run megatron.training.training
    megatron.core.tokenizers.text.text_tokenizer datasets
    vllm.v1.engine.llm_engine vllm.v1.worker.gpu_model_runner vllm.v1.worker.gpu_worker
    vllm.model_executor.layers.fused_moe.experts.cpu_moe
"""  # not vLLM's worker on CPU, whose import replaces torch's streams: in a job Megatron's are made before it


def preload(modules: list[str]) -> dict[str, str]:
    """Import them; returns the variables that this set, as each start of a job would."""
    before = dict(os.environ)
    for name in modules:
        if name.startswith("vllm"):
            from mindspeed_rl_plugin.host.engine_env import prepare_engine_env

            prepare_engine_env("cpu", sleep_mode=True)
        importlib.import_module(name)
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


class Server:
    """Forks for every request, tells the client how its fork ended, and kills the fork of a client that is gone."""

    def __init__(self, address: str) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(address)
        self.listener.listen(64)
        self.select = selectors.DefaultSelector()
        self.select.register(sys.stdin, selectors.EVENT_READ, self.leave)
        self.select.register(self.listener, selectors.EVENT_READ, self.accept)
        self.processes: set[int] = set()

    def serve(self) -> dict:
        """Until standard input ends. Returns, in a fork, the request that it is to run."""
        print("ready", flush=True)
        while True:
            for key, _ in self.select.select():
                request = key.data()
                if request is not None:
                    return request

    def leave(self) -> None:
        for process in self.processes:
            os.killpg(process, signal.SIGKILL)
        sys.exit()

    def accept(self) -> dict | None:
        client = self.listener.accept()[0]
        request = receive(client)
        process = os.fork()
        if process == 0:
            os.setsid()
            self.listener.close()
            client.close()
            return request
        for file in request["files"]:
            os.close(file)
        client.sendall(process.to_bytes(8, "big"))
        self.processes.add(process)
        watch = os.pidfd_open(process)
        self.select.register(watch, selectors.EVENT_READ, lambda: self.ended(process, watch, client))
        self.select.register(client, selectors.EVENT_READ, lambda: self.client_gone(process, client))
        return None

    def client_gone(self, process: int, client: socket.socket) -> None:
        self.select.unregister(client)
        client.close()
        with contextlib.suppress(ProcessLookupError):  # killed before it led a group of its own
            os.kill(process, signal.SIGKILL)
            os.killpg(process, signal.SIGKILL)

    def ended(self, process: int, watch: int, client: socket.socket) -> None:
        self.processes.remove(process)
        self.select.unregister(watch)
        os.close(watch)
        status = os.waitpid(process, 0)[1]
        if client.fileno() >= 0:
            self.select.unregister(client)
            client.sendall(status.to_bytes(8, "big"))
            client.close()


def receive(client: socket.socket) -> dict:
    """A request: argv, env, cwd, and the client's files."""
    head, files, *_ = socket.recv_fds(client, 8, 4)
    left, parts = int.from_bytes(head, "big"), []
    while left:
        parts.append(client.recv(min(left, 1 << 16)))
        left -= len(parts[-1])
    return {**json.loads(b"".join(parts)), "files": files}


def become(request: dict, given: dict[str, str], path: list[str]) -> None:
    """Be the process that the client stands for. given: variables to set where the client has none of its own."""
    for number, file in enumerate(request["files"][:3]):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update({**given, **request["env"]})
    for file in request["files"][3:]:
        os.environ[REWARD] = str(file)
    os.chdir(request["cwd"])
    random.seed()
    tempfile.tempdir = None
    words = request["argv"]
    if words[0] == "-u":
        sys.stdout.reconfigure(write_through=True)
        words = words[1:]
    extra = [p for p in request["env"].get("PYTHONPATH", "").split(os.pathsep) if p]
    first = os.getcwd() if words[0] in ("-m", "-c") else os.path.dirname(os.path.abspath(words[0]))
    sys.path[:] = [first, *extra, *path]
    run(words)


def run(words: list[str]) -> None:
    """`python WORDS`: -m MODULE, -c CODE or a script, and what comes after."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy._run_module_as_main(words[1])
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), vars(main))
    else:
        sys.argv, main.__file__ = words, words[0]
        with open(words[0], "rb") as script:
            exec(compile(script.read(), words[0], "exec"), vars(main))


if __name__ == "__main__":
    extra = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [entry for entry in sys.path[1:] if entry not in extra]
    variables = preload(sys.argv[2:] or PRELOADED.split())
    gc.collect()
    gc.freeze()
    become(Server(sys.argv[1]).serve(), variables, path)
