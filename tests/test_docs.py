"""The notebooks' two halves agree and carry no outputs; the site builds without a warning and its pages fetch nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_every_notebook_is_a_pair() -> None:
    assert [file.stem[:2] for file in NOTEBOOKS] == ["00", "01", "02", "03", "04", "05", "06"]
    assert {file.stem for file in NOTEBOOKS} == {file.stem for file in (ROOT / "notebooks").glob("*.py")}


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda file: file.stem)
def test_the_halves_of_a_notebook_agree_and_have_no_outputs(notebook: Path) -> None:
    jupytext = pytest.importorskip("jupytext")
    left, right = jupytext.read(notebook), jupytext.read(notebook.with_suffix(".py"))
    sources = [[(cell.cell_type, cell.source) for cell in half.cells] for half in (left, right)]
    assert sources[0] == sources[1], f"run: jupytext --sync {notebook}"
    for cell in left.cells:
        assert not cell.get("outputs") and not cell.get("execution_count")


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="the sdist has no docs")
def test_results_files_that_pages_name_are_there_and_no_others() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
    named = set(re.findall(r"(?<![-\w])[hH][12]00-[\w-]+\.json", pages))
    results = ROOT / "benchmarks" / "results"
    there = {str(path.relative_to(results)) for path in results.rglob("*.json")}
    assert named <= {Path(path).name for path in there}, "a run whose file is gone is named by its commit"
    used = pages + "".join(file.read_text() for folder in ("notebooks", "tests") for file in (ROOT / folder).glob("*.py"))
    assert not [path for path in there if path.removeprefix("h100-") not in used], "git's history keeps what nothing uses"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no clone")
def test_a_clone_without_history_is_under_6_mb() -> None:
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name]
    assert sum(file.lstat().st_size for file in files if file.is_file()) < 6e6


class Fetched(HTMLParser):
    """Collects what a page makes a browser fetch."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "video", "audio", "source"):
            self.addresses.append(given.get("src") or "")
        elif tag == "link" and given.get("rel") in ("stylesheet", "preload", "icon", "prefetch"):
            self.addresses.append(given.get("href") or "")


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="the sdist has no docs")
def test_the_site_builds_without_warnings_or_network(tmp_path: Path) -> None:
    """Notebooks are not executed here: nbmake does that, and so does `make docs`."""
    pytest.importorskip("sphinx")
    pytest.importorskip("myst_nb")
    pytest.importorskip("furo")
    closed = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-D", "nb_execution_mode=off"]
    doctrees = str(tmp_path / "doctrees")
    done = subprocess.run(
        [*command, "-d", doctrees, str(ROOT / "docs"), str(tmp_path / "site")],
        env=os.environ | closed,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert {"index.html", "api.html", "how/error_bound.html"} <= {str(page.relative_to(tmp_path / "site")) for page in pages}
    for page in pages:
        outside = [address for address in Fetched(page.read_text()).addresses if re.match(r"(https?:)?//", address)]
        assert not outside, f"{page.name} fetches {outside}"
    for sheet in (tmp_path / "site").rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", sheet.read_text()), sheet
