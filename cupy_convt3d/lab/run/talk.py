"""Messages between processes over pipes or sockets: a length, then that many bytes; read with a limit and a deadline.

Requests go down, from a process to the one that it has started, and are pickles. Replies come up, perhaps from a stranger's code,
and are JSON objects: data that is read and never run.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Mapping
from typing import Any

REPLY_LIMIT = 1 << 20
_LONGEST_MS = 2**31 - 1  # that the system waits for
_LENGTH = 8  # bytes that say how long a message is


class Late(Exception):
    """The other side did not answer, or did not read, in time."""


class Ended(Exception):
    """The other side has closed its end."""


class Garbled(Exception):
    """What came is no message."""


def write(descriptor: int, data: bytes, deadline: float | None = None) -> None:
    """Write one message; with a deadline the descriptor must not block.

    Raises:
        Late, Ended.
    """
    rest = memoryview(len(data).to_bytes(_LENGTH, "little") + data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            wait(descriptor, select.POLLOUT, deadline)
        except ConnectionError:
            raise Ended from None


class Reader:
    """Reads messages from a descriptor that nobody else reads from: it reads ahead."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._data, self._poll = descriptor, bytearray(), select.poll()
        self._poll.register(descriptor, select.POLLIN)

    def read(self, limit: int | None = None, deadline: float | None = None) -> bytes:
        """Read one message of at most `limit` bytes.

        Raises:
            Late, Ended, Garbled.
        """
        self._fill(_LENGTH, deadline)
        size = int.from_bytes(self._data[:_LENGTH], "little")
        if limit is not None and size > limit:
            raise Garbled(f"a message of {size} bytes; at most {limit} are read")
        self._fill(_LENGTH + size, deadline)
        message = bytes(self._data[_LENGTH : _LENGTH + size])
        del self._data[: _LENGTH + size]
        return message

    def _fill(self, count: int, deadline: float | None) -> None:
        while len(self._data) < count:
            if deadline is not None:
                _wait(self._poll, deadline)
            try:
                piece = os.read(self._descriptor, min(max(count - len(self._data), 1 << 16), 1 << 20))
            except ConnectionError:  # a socket whose other side has not read all
                raise Ended from None
            if not piece:
                raise Ended
            self._data += piece


def take(data: bytearray) -> bytes | None:
    """Take the first message off what was read; None where it is not whole yet.

    Raises:
        Garbled: it is longer than `REPLY_LIMIT`.
    """
    if len(data) < _LENGTH:
        return None
    size = int.from_bytes(data[:_LENGTH], "little")
    if size > REPLY_LIMIT:
        raise Garbled("it writes to the pipe of the replies")
    if len(data) < _LENGTH + size:
        return None
    message = bytes(data[_LENGTH : _LENGTH + size])
    del data[: _LENGTH + size]
    return message


def encode(reply: Mapping[str, Any]) -> bytes:
    """Return a reply as it is written."""
    return json.dumps(reply).encode()


def done(serial: int) -> bytes:
    """Return the reply to a request that had no more to ask than that it be done."""
    return b'{"serial": %d}' % serial


def decode(data: bytes) -> dict[str, Any]:
    """Return a reply.

    Raises:
        Garbled: it is no JSON object.
    """
    try:
        reply = json.loads(data)
    except (ValueError, RecursionError):
        raise Garbled("a reply that is no JSON") from None
    if not isinstance(reply, dict):
        raise Garbled("a reply that is no JSON object")
    return reply


def wait(descriptor: int, events: int, deadline: float | None) -> None:
    """Wait until a descriptor is ready.

    Raises:
        Late.
    """
    poll = select.poll()  # unlike `select` it takes descriptors past 1023
    poll.register(descriptor, events)
    _wait(poll, deadline)


def _wait(poll: select.poll, deadline: float | None) -> None:
    if not poll.poll(None if deadline is None else min(max(0.0, deadline - time.monotonic()) * 1e3, _LONGEST_MS)):
        raise Late
