"""Ports for the servers of tests, also of several that run at once on a machine."""

import contextlib
import random
import socket


def free_port() -> int:
    """A port that nobody listens on, below those that the system gives to outgoing connections."""
    while True:
        port = 20000 + random.SystemRandom().randrange(12000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
