"""The talk between the judge of `convt3d kernelbench` and its children: JSON objects, each after its length, and open files.

Nothing that a child sends is code, and none of it is longer than a limit.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import time
from typing import Any

LIMIT_BYTES = 16 << 20  # of one message; the state of a large model names thousands of tensors
LOG_BYTES = 16 << 10
Message = dict[str, Any]


class Gone(Exception):
    """The other side has closed its channel, or has died."""


class Late(Exception):
    """The other side did not answer in time."""


class Broken(Exception):
    """What came is no message."""


class Channel:
    """One end of a conversation, and the pipe that brings what the other side prints, of which only the end is kept.

    Args:
        log: the pipe's descriptor; closed with the channel.
    """

    def __init__(self, end: socket.socket, log: int | None = None) -> None:
        self._end, self._log = end, log
        self._printed = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(end, selectors.EVENT_READ)
        if log is not None:
            os.set_blocking(log, False)
            self._selector.register(log, selectors.EVENT_READ)

    def close(self) -> None:
        self._selector.close()
        self._end.close()
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def send(self, message: Message, *descriptors: int, deadline: float | None = None) -> None:
        """Send a message and open files."""
        data = json.dumps(message).encode()
        self._end.settimeout(None if deadline is None else max(deadline - time.monotonic(), 1e-3))
        try:
            self._end.sendall(len(data).to_bytes(4, "little") + data)
            if descriptors:
                socket.send_fds(self._end, [b"\0"], descriptors)
        except TimeoutError:
            raise Late from None
        except OSError:
            raise Gone from None
        finally:
            self._end.settimeout(None)

    def receive(self, deadline: float | None = None) -> Message:
        """Return the next message."""
        size = int.from_bytes(self._read(4, deadline), "little")
        if size > LIMIT_BYTES:
            raise Broken(f"a message of {size} bytes")
        data = self._read(size, deadline)
        try:
            message = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise Broken(f"no JSON: {error}") from None
        if not isinstance(message, dict):
            raise Broken("JSON, but no object")
        return message

    def receive_descriptors(self, count: int) -> list[int]:
        """Return the open files that came with the last message."""
        data, descriptors, _, _ = socket.recv_fds(self._end, 1, count)
        if not data:
            raise Gone
        return list(descriptors)

    def _read(self, count: int, deadline: float | None) -> bytes:
        data = bytearray()
        while len(data) < count:
            ready = self._selector.select(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if not ready:
                raise Late
            for key, _ in ready:
                if key.fileobj is not self._end:
                    self.drain()
                    continue
                try:
                    piece = self._end.recv(min(count - len(data), 1 << 20))
                except OSError:
                    raise Gone from None
                if not piece:
                    raise Gone
                data += piece
        return bytes(data)

    def drain(self) -> str:
        """Return the end of what the other side has printed until now."""
        try:
            while self._log is not None and (piece := os.read(self._log, 1 << 16)):
                self._printed = (self._printed + piece)[-LOG_BYTES:]
                if len(piece) < 1 << 16:
                    return self._printed.decode(errors="replace")
            if self._log is not None:
                self._selector.unregister(self._log)  # all ends are closed
                os.close(self._log)
                self._log = None
        except BlockingIOError:
            pass
        return self._printed.decode(errors="replace")
