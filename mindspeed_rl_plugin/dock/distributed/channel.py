"""The calling side: one blocking connection to a service, requests with deadlines."""

from __future__ import annotations

import secrets
import select
import time
from collections.abc import Sequence

import numpy as np

from mindspeed_rl_plugin.dock.distributed import frames
from mindspeed_rl_plugin.dock.distributed.frames import Message
from mindspeed_rl_plugin.dock.distributed.service import Address, check_server, endpoint, tune

MARGIN = 15.0  # seconds the caller waits longer than the other side, whose error knows more
ERRORS = {"ValueError": ValueError, "TimeoutError": TimeoutError}


class Silent(TimeoutError):
    """What is at the other end does not answer, though the connection stands."""


class Channel:
    """A connection to `address`, made now. name: of this process; patience: seconds for an ordinary answer.

    Raises ConnectionError when nobody answers there, PermissionError when it is another job's.
    """

    def __init__(self, address: Address, secret: bytes, node: str, name: str, patience: float) -> None:
        self.address, self._patience = address, patience
        self._socket, target = endpoint(address, node)
        self._limit = patience
        self._socket.settimeout(patience)
        self._reader = frames.Reader()
        try:
            self._socket.connect(target)
            tune(self._socket)
            nonce = bytes(self._exactly(frames.NONCE))
            mine = secrets.token_bytes(frames.NONCE)
            self._socket.sendall(mine + frames.proof(secret, "client", (nonce, mine)))
            check_server(bytes(self._exactly(frames.NONCE)), secret, mine, nonce, address)
        except PermissionError:
            self.close()
            raise
        except (EOFError, OSError) as error:  # it may be ending, or starting again
            self.close()
            raise ConnectionError(f"no dock answers at {address}: {error}") from error
        self.tell(Message("hello", {"name": name}))

    def tell(self, message: Message) -> None:
        """Send what needs no answer."""
        try:
            for buffer in frames.encode(message):  # one, where nothing is large
                self._socket.sendall(buffer)
        except TimeoutError as error:
            self.close()  # half a message is out: nothing else can follow it
            raise Silent(f"{self.address} does not read {message.kind!r}") from error
        except OSError as error:
            self.close()
            raise ConnectionError(f"lost the dock at {self.address} while sending {message.kind!r}: {error}") from error

    def ask(
        self,
        message: Message,
        seconds: float = 0.0,
        recycle: bool = False,
        scatter: Sequence[np.ndarray] | None = None,
    ) -> Message:
        """Send a request and wait for its answer; seconds: how long the other side itself may wait; recycle: the
        arrays of the answer are valid only until the next answer that is recycled, and take no fresh memory;
        scatter: uint8 arrays that an answer's one array of so many bytes goes to, one after the other.

        Raises what the other side raised, Silent when it does not answer, ConnectionError when it is gone.
        """
        self._reader.recycle, self._reader.scatter = recycle, scatter
        self.tell(message)
        begin, limit = time.monotonic(), seconds + self._patience + MARGIN
        if limit != self._limit:  # a system call, and deadlines seldom change
            self._limit = limit
            self._socket.settimeout(limit)
        try:
            answer = self._message()
        except TimeoutError as error:
            self.close()  # a late answer would be taken for that of the next request
            spent = time.monotonic() - begin
            raise Silent(f"{self.address} gave no answer to {message.kind!r} for {spent:.0f} s") from error
        except (EOFError, OSError) as error:
            self.close()
            raise ConnectionError(f"lost the dock at {self.address} during {message.kind!r}: {error}") from error
        except BaseException:
            self.close()
            raise
        if answer.kind == "error":
            raise ERRORS[answer.note["type"]](answer.note["text"])
        return answer

    @property
    def closed(self) -> bool:
        """Whether nothing can be asked here any more."""
        return self._socket.fileno() < 0

    @property
    def quiet(self) -> bool:
        """Whether the connection stands and nothing has come: between two requests that would be its end."""
        if self.closed:
            return False
        ready = select.poll()
        ready.register(self._socket, select.POLLIN)
        return not ready.poll(0)

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._socket.close()

    def __del__(self) -> None:
        if "_socket" in self.__dict__:  # its thread has ended, or nothing is asked there any more
            self._socket.close()

    def _message(self) -> Message:
        while (message := self._reader.message()) is None:
            got = self._socket.recv_into(self._reader.room())
            if not got:
                raise EOFError("the connection ended")
            self._reader.got(got)
        return message

    def _exactly(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        view, at = memoryview(data), 0
        while at < nbytes:
            got = self._socket.recv_into(view[at:])
            if not got:
                raise EOFError("the connection ended")
            at += got
        return data
