"""Stands in for `python` in a test's command: a fork of the server runs it, with this process's arguments and files
(standard ones, and that of an agent's reward).

Signals go on to the fork; its end, by a signal too, is the end of this process. Where this process is killed, the
server kills the fork.
"""

import json
import os
import signal
import socket
import sys

REWARD = "MINDSPEED_RL_REWARD_FD"
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main(address: str) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    request = json.dumps({"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}).encode()
    files = [0, 1, 2, *([int(os.environ[REWARD])] if REWARD in os.environ else [])]
    socket.send_fds(server, [len(request).to_bytes(8, "big")], files)
    server.sendall(request)
    fork = int.from_bytes(server.recv(8), "big")
    for number in PASSED_ON:
        signal.signal(number, lambda received, frame: os.kill(fork, received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    status = int.from_bytes(server.recv(8), "big")
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) in PASSED_ON:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))
