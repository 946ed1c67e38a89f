"""Temporary folders: what is in one is removed however it was left, and of a process that was killed by the next one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cupy_convt3d import scratch


def test_what_is_removed_may_be_anything(tmp_path: Path) -> None:
    """Deeper than a path or a call may be; without rights; a link, whose target stays."""
    (kept := tmp_path / "kept").mkdir()
    (kept / "file").touch()
    (folder := tmp_path / "folder").mkdir()
    inner = os.open(folder, os.O_RDONLY)
    for _ in range(3000):
        for name in ("d", "e"):
            os.mkdir(name, dir_fd=inner)
        os.symlink(kept, "link", dir_fd=inner)
        outer, inner = inner, os.open("d", os.O_RDONLY, dir_fd=inner)
        os.close(outer)
    os.close(inner)
    os.chmod(folder / "d", 0)
    (link := tmp_path / "link").symlink_to(kept)
    for path in (folder, link, tmp_path / "nothing"):
        scratch.remove(path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"] and (kept / "file").exists()


def test_a_killed_processs_cache_is_removed_by_the_next(tmp_path: Path) -> None:
    """The private one, that stands in for a directory which cannot be made."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "CONVT3D_CACHE": "/dev/null/cache", "PYTHONWARNINGS": "ignore"}
    program = "import os; from cupy_convt3d import cache; print(cache.cache_directory(), flush=True); os.kill(os.getpid(), 9)"
    made = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False).stdout.strip()
    assert Path(made).is_dir()
    subprocess.run([sys.executable, "-c", "from cupy_convt3d import scratch; scratch.folder()"], env=environment, check=True)
    assert not Path(made).exists()
