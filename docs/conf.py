"""Sphinx's configuration: `make docs` builds the site into build/docs, with no network and nothing fetched by the pages."""

from __future__ import annotations

import argparse
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import latex2mathml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # documents this source tree, installed or not
NOTEBOOKS = Path(__file__).parent / "notebooks"
if not NOTEBOOKS.exists():  # NOTE: not in git: the sdist would follow the link and leave out what it points to
    NOTEBOOKS.symlink_to(ROOT / "notebooks", target_is_directory=True)

project = "cupy_convt3d"
author = "the cupy_convt3d developers"
copyright = "the cupy_convt3d developers, Apache-2.0"
try:
    release = metadata.version("cupy-convt3d")
except metadata.PackageNotFoundError:
    release = "source"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_generated", "notebooks/*.py", "**/.ipynb_checkpoints"]
default_role = "literal"  # docstrings quote code with single backticks
nitpicky = False

html_theme = "furo"
html_title = "cupy_convt3d"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sphinx = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True
nb_ipywidgets_js: dict[str, Any] = {}  # sliders need a running kernel, and their scripts a network


def show_inline_math(self: Any, node: nodes.math) -> None:
    self.body.append(latex2mathml.tex2mathml(node.astext()).strip())
    raise nodes.SkipNode


def show_block_math(self: Any, node: nodes.math_block) -> None:
    self.body.append(f'<div class="math">{latex2mathml.tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def highlight_cells_as_cuda(app: Any, doctree: nodes.document) -> None:
    for block in doctree.findall(nodes.literal_block):
        if block.astext().startswith("%%convt3d"):
            block["language"] = "cuda"


def write_command_line_help(app: Any) -> None:
    """Write what `convt3d COMMAND --help` prints, for the page on the command line."""
    from cupy_convt3d.cli import _parser

    parser = _parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    pages = [parser, *commands.choices.values()]
    for page in pages:
        page.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=88, max_help_position=28)
    target = Path(app.srcdir) / "_generated"
    target.mkdir(exist_ok=True)
    (target / "command_line.txt").write_text("\n\n".join(f"$ {page.prog} --help\n{page.format_help()}" for page in pages))


def write_mutants(app: Any) -> None:
    """Write the scores of the mutants, and the reasons of those that live, for the page on them."""
    from cupy_convt3d.lab.mutants import explanations
    from cupy_convt3d.lab.mutants.command import page, scores

    source, target = Path(app.srcdir), Path(app.srcdir) / "_generated"
    target.mkdir(exist_ok=True)
    (target / "mutants.md").write_text(page(scores(source / "mutation_scores.json"), explanations(source / "mutation.toml")))


def write_plants(app: Any) -> None:
    """Write what became of the plants, for the same page."""
    from cupy_convt3d.lab.mutants.plants import plants
    from cupy_convt3d.lab.mutants.plants_command import kept, page

    source, target = Path(app.srcdir), Path(app.srcdir) / "_generated"
    target.mkdir(exist_ok=True)
    everything = plants(source.parent / "tests" / "plants")
    (target / "plants.md").write_text(page(everything, kept(source / "plant_scores.json")))


def setup(app: Any) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (show_inline_math, None), (show_block_math, None))
    app.connect("doctree-read", highlight_cells_as_cuda)
    app.connect("builder-inited", write_command_line_help)
    app.connect("builder-inited", write_mutants)
    app.connect("builder-inited", write_plants)
    return {"parallel_read_safe": True}
