"""An engine that joins a job, and is killed at a moment of its work: the first argument; the others are its own."""

import os
import signal
import sys
import time
from dataclasses import replace

from rerouted_script import built

from mindspeed_rl_plugin.__main__ import main
from mindspeed_rl_plugin.dock import Dock
from mindspeed_rl_plugin.dock.calls import Calls
from mindspeed_rl_plugin.dock.messages import Put
from mindspeed_rl_plugin.engine import vllm_api
from mindspeed_rl_plugin.engine.vllm_engine import VllmEngine
from mindspeed_rl_plugin.weights.published_memory import VersionSource
from mindspeed_rl_plugin.weights.pull import Puller


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def dying(owner, name, number, before=True, only=lambda *args: True):
    """The number-th call of a method is the end, before or after it is made."""
    original, calls = getattr(owner, name), []

    def method(self, *args, **named):
        if only(*args):
            calls.append(0)
        if before and len(calls) == number:
            die()
        result = original(self, *args, **named)
        if len(calls) == number:
            die()
        return result

    setattr(owner, name, method)


def leased():
    """The end of the second lease that brings rows."""
    original, brought = Dock.lease, []

    def lease(self, *args, **named):
        result = original(self, *args, **named)
        brought.extend([0] * bool(len(result)))
        return result if len(brought) < 2 else die()

    Dock.lease = lease


def slow():
    """Each step of the engine takes longer than bringing weights, so that some response is always in the making. A
    response, or a turn, has at most twice as many tokens as its prompt."""
    step, submit = VllmEngine._step, VllmEngine.submit

    def cut(request):
        most = min(request.sampling.max_tokens, 2 * len(request.prompt_tokens))
        return replace(request, sampling=replace(request.sampling, max_tokens=most))

    VllmEngine._step = lambda self: time.sleep(0.03) or step(self)
    VllmEngine.submit = lambda self, requests: submit(self, [cut(request) for request in requests])


MOMENTS = {
    "in mid-decode": lambda: dying(VllmEngine, "_step", 4, before=False),
    "in mid-pull": lambda: dying(VersionSource, "read", 2),
    "between lease and submit": leased,
    "between put and commit": lambda: dying(Calls, "ask_warehouse", 2, only=lambda index, m, *_: isinstance(m, Put)),
    "with new weights half written": lambda: dying(Puller, "apply", 2),
    "never": lambda: None,
    "never, but slow": slow,
}

if __name__ == "__main__":
    if "BIAS" in os.environ:
        vllm_api.build = built
    MOMENTS[sys.argv[1]]()
    sys.exit(main(["generate", *sys.argv[2:]]))
