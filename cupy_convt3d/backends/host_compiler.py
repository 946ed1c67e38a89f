"""The host's compiler as a process with limits: of memory, time and the size of files. It ends with whoever started it."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .. import scratch
from ..errors import CompileError
from ..limits import share_of_memory

TIME_LIMIT_S = 600.0
MOST_BYTES = 512 << 20  # of a file that it writes
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
    return f"a file that the compiler writes would be larger than {_most_bytes()} bytes, the most that it may have"


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
        CompileError: it took longer than `TIME_LIMIT_S`.
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
                text=True,
                errors="replace",
                env=environment,
                cwd=folder,
                pass_fds=(file.fileno(),),
                start_new_session=True,
            )
            try:
                output, log = process.communicate(timeout=TIME_LIMIT_S)
            except subprocess.TimeoutExpired:
                raise CompileError(f"{what}: {command[0]} did not end within {TIME_LIMIT_S:g} s") from None
            finally:
                if process.poll() is None:  # late, or a Ctrl-C
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.communicate()
    finally:
        os.close(lifeline)
        os.close(ours)
    return subprocess.CompletedProcess(list(command), process.returncode, output, log)
