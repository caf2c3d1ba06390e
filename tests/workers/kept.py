"""A worker below a keeper, which starts processes that no kill of its group reaches. Imports little, to start soon."""

import os
import signal
import subprocess
import time

from mindspeed_rl_plugin.workers.process import Program, Worker, wait_for


def serve(connection, lifeline):
    """A worker that starts a process in a session of its own, and one below that, which outlives the one above it;
    answers with their ids; then its message says how it ends."""
    from mindspeed_rl_plugin.workers.child import Parent
    from mindspeed_rl_plugin.workers.keeper import keep

    keep(connection, lifeline, 0.5)
    parent = Parent(connection, None)
    parent.receive()
    parent.send((None, None))
    how = parent.receive()
    sleep = subprocess.Popen(["sleep", "600"], start_new_session=True)
    shell = subprocess.run(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True)
    parent.send([os.getpid(), sleep.pid, int(shell.stdout)])
    if how == "exit":
        os._exit(3)
    if how == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    parent.receive()


def made(how="wait"):
    """A worker, and the ids of all below it."""
    worker = Worker(Program("kept:serve", None, list[int], "a worker", ValueError, None, 5.0), "", "nothing")
    while not worker.ready():
        wait_for([worker], time.monotonic() + 60)
    worker.call(how, 60.0)
    while (found := worker.answer()) is None:
        wait_for([worker], time.monotonic() + 60)
    return worker, found
