"""The host's compiler as a process with limits: of memory, time, the size of files and what it prints.

It ends with whoever started it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from .. import scratch
from ..errors import CompileError
from ..limits import share_of_memory

TIME_LIMIT_S = 600.0
MOST_BYTES = 512 << 20  # of a file that it writes
MOST_PRINTED = 32 << 20  # bytes that are read of what it prints; the preprocessor prints a unit of ours in one
# A shell stands between. It limits the memory (in KiB) and files (in blocks of 512 bytes), and its standard input is a pipe whose other
# end only we hold: when that closes, however we end, it ends its process group. So a compiler does not outlive us, nor do the processes
# that it starts (cc1plus, ld).
_SUPERVISE = """\
ulimit -v "$1" 2>/dev/null
ulimit -f "$2" 2>/dev/null
unit=$3
shift 3
exec 3<&0
"$@" <"/dev/fd/$unit" 3<&- &
compiler=$!
{ read -r gone <&3; kill -s KILL -- -$$; } >/dev/null 2>&1 &
watch=$!
wait $compiler
status=$?
kill -s KILL $watch
exit $status
"""


def environment_of_compiler() -> dict[str, str]:
    """Return ours without a sanitizer's runtime, which is for our own process: it reserves more addresses than a compiler may have."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


def wrote_too_much(log: str) -> str | None:
    """Return what is said where a compiler, or a program that it runs, has ended at the limit of a file's size; None if none has."""
    if "File size limit exceeded" not in log and "File too large" not in log:
        return None
    name = " (ulimit -f)" if _most_bytes() < MOST_BYTES else ""
    return f"a file that the compiler writes would be larger than {_most_bytes()} bytes, the most that it may have{name}"


def _most_bytes() -> int:
    own = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return MOST_BYTES if own == resource.RLIM_INFINITY else min(MOST_BYTES, own)


def run_compiler(
    command: Sequence[str], unit: str = "", what: str = "the compiler", folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a compiler on a text, and return what it said.

    Args:
        command: the compiler with its arguments.
        unit: its standard input.
        what: as errors name it.
        folder: where it runs; None: here.

    Raises:
        CompileError: it took longer than `TIME_LIMIT_S`, or its output is longer than `MOST_PRINTED`; of its log so much is kept.
    """
    environment = environment_of_compiler()
    lifeline, ours = os.pipe()
    try:
        with scratch.directory() as temporary, tempfile.TemporaryFile(dir=temporary) as file:
            environment["TMPDIR"] = temporary  # a compiler that is killed leaves its files there
            file.write(unit.encode(errors="surrogateescape"))
            file.seek(0)
            arguments = (str(share_of_memory() >> 10), str(_most_bytes() >> 9), str(file.fileno()), *command)
            process = subprocess.Popen(
                ["/bin/sh", "-c", _SUPERVISE, "sh", *arguments],
                stdin=lifeline,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                cwd=folder,
                pass_fds=(file.fileno(),),
                start_new_session=True,
            )
            try:
                output, log = _printed(process)
                if len(output) > MOST_PRINTED:
                    raise CompileError(f"{what}: {command[0]} prints more than {MOST_PRINTED} bytes")
            except subprocess.TimeoutExpired:
                raise CompileError(f"{what}: {command[0]} did not end within {TIME_LIMIT_S:g} s") from None
            finally:
                if process.poll() is None:  # late, or a Ctrl-C
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                for end in (process.stdout, process.stderr):
                    end.close()  # type: ignore[union-attr]
    finally:
        os.close(lifeline)
        os.close(ours)
    texts = (printed.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n") for printed in (output, log))
    return subprocess.CompletedProcess(list(command), process.returncode, *texts)


def _printed(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Read what a process prints until it has ended, or its output is longer than `MOST_PRINTED`; what its log has beyond is thrown away.

    Raises:
        TimeoutExpired: it has not ended in time.
    """
    deadline = time.monotonic() + TIME_LIMIT_S
    output, log = bytearray(), bytearray()
    with selectors.PollSelector() as files:
        files.register(process.stdout, selectors.EVENT_READ, output)  # type: ignore[arg-type]
        files.register(process.stderr, selectors.EVENT_READ, log)  # type: ignore[arg-type]
        while files.get_map() and len(output) <= MOST_PRINTED:
            if (left := deadline - time.monotonic()) <= 0:
                raise subprocess.TimeoutExpired(process.args, TIME_LIMIT_S)
            for key, _ in files.select(left):
                piece = os.read(key.fd, 1 << 16)
                if not piece:
                    files.unregister(key.fileobj)
                if len(key.data) <= MOST_PRINTED:
                    key.data.extend(piece)
    if len(output) <= MOST_PRINTED:
        process.wait(max(0.0, deadline - time.monotonic()))
    return bytes(output), bytes(log)
