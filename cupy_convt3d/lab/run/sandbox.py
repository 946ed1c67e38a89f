"""A sandbox for the processes that a stranger's kernel runs in, of what the system offers: bubblewrap, or namespaces by `unshare`.

In it there is no network, no process but the judge's and the kernel's, no home directory and nothing that others have in the
temporary ones; the rest of the root file system can be read and not written to.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ... import registry
from ...cache import cache_directory
from ...errors import BackendError, printable
from ...kernel import Kernel

# $1: directories to hide, $2: paths in them to keep, each a line. What is kept lies in a directory of its own meanwhile. The user
# namespace inside of the first one locks its mounts.
_BY_UNSHARE = """
set -e
IFS='
'
aside=/mnt
mount -t tmpfs none "$aside"
number=0
for path in $2; do number=$((number + 1)); mkdir "$aside/$number"; mount --bind "$path" "$aside/$number"; done
for path in $1; do mount -t tmpfs -o mode=1777 none "$path"; done
number=0
for path in $2; do
  number=$((number + 1)); mkdir -p "$path"; mount --bind "$aside/$number" "$path"; mount -o remount,bind,ro "$path"
done
umount -R "$aside"
mount -o remount,bind,ro /
cd /
shift 2
exec unshare --user --map-root-user --mount "$@"
"""


def notice(kernel: Kernel, sandboxed: bool) -> str | None:
    """Return what is said before a kernel that did not come with the package runs on the host; None for one that did."""
    if kernel.source in {known.source for known in registry.kernels().values()}:
        return None
    name = printable(kernel.name, 200)
    if sandboxed:
        return f"{name}: running its code in a sandbox, without network, home directory or other processes"
    return f"{name}: running its code as it is, with your rights, in a child process (--sandbox takes most of them away)"


def wrap(command: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return a command and an environment that run `command` in a sandbox.

    Raises:
        BackendError: the system has nothing that makes one.
    """
    home = os.path.expanduser("~")  # "~" itself where there is none
    hidden = _directories(Path(home), Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"), Path("/run/user"))
    package = Path(__file__).resolve().parents[2]
    kept = _directories(*map(Path, (sys.prefix, sys.base_prefix)), package, package.parent / "kernels", cache_directory())
    outer = dict(environment)
    preload = outer.pop("LD_PRELOAD", None)  # a sanitizer's runtime is for the judge alone
    inner = [*(["env", f"LD_PRELOAD={preload}"] if preload else []), *command]
    if (bwrap := shutil.which("bwrap")) is not None:
        options = ["--unshare-all", "--die-with-parent", "--new-session", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
        options += [word for path in hidden for word in ("--tmpfs", path)]
        options += [word for path in kept for word in ("--ro-bind", path, path)]
        return [bwrap, *options, "--chdir", "/", *inner], outer
    if (unshare := shutil.which("unshare")) is not None:
        spaces = ["--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child", "--net", "--ipc", "--uts", "--mount-proc"]
        return [unshare, *spaces, "sh", "-c", _BY_UNSHARE, "sh", "\n".join(hidden), "\n".join(kept), *inner], outer
    raise BackendError("sandbox=True: needs bubblewrap (`apt install bubblewrap`) or util-linux's unshare, and found neither on PATH")


def _directories(*paths: Path) -> list[str]:
    return list(dict.fromkeys(str(path.resolve()) for path in paths if path.is_dir()))
