"""Settings of the documentation site, which ``make docs`` builds from the pages as they are.

The pages are plain Markdown, with relative links that a Git host follows, too. Only pages of the
API reference have directives of Sphinx's, in fenced blocks.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.ext.autodoc.mock import mock, undecorate

import ficco

project, author = "ficco", "The ficco authors"
release = ficco.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

# Sources lie in the root of the repository, so that pages can link to files beside docs/.
root_doc = "docs/index"
include_patterns = ["docs/**.md", "[CS]*.md"]  # CHANGELOG, CODE_OF_CONDUCT, CONTRIBUTING, SECURITY
exclude_patterns = [".*", "build", "dist", "ficco", "tests", "benchmarks", "examples", "configs"]

# Anchors as a Git host makes them; links to others are warnings, and warnings are errors.
myst_heading_anchors = 4
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!ficco\.).*")]  # other projects' names
nitpick_ignore = [
    ("py:class", "ficco.ops.routing.Placed"),  # of a class that users do not make
    ("py:class", "ficco.nn.training.Module"),  # a type variable
]

autodoc_mock_imports = ["megatron", "spmd_types", "torchtitan", "transformers", "triton", "vllm"]
autodoc_member_order = "bysource"
napoleon_numpy_docstring = napoleon_use_param = False
napoleon_custom_sections = [("Attributes", "params_style")]
python_maximum_signature_line_length = 88

smartquotes_action = "D"  # dashes, not quotes: texts stay as they are
html_theme = "furo"
html_title = f"ficco {release}"
html_static_path, html_css_files = ["static"], ["site.css"]
html_copy_source = html_show_copyright = False
pygments_style, pygments_dark_style = "friendly", "monokai"

# Device functions as the functions that they were, whether this environment has Triton or not.
with mock(["triton"]):
    from ficco import tile
for each in tile.__all__:
    function = undecorate(getattr(tile, each))
    setattr(tile, each, getattr(function, "fn", function))

#: Annotations of machine files, which signatures leave out.
SCHEMA = re.compile(
    r"~?typing\.Annotated\[(.+?), ~?ficco\.machine\.model\.\w+\((?:[^()]|\([^()]*\))*\)\]"
)
#: Tags by which a page loads files of other hosts.
FETCHED = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=\"(?:https?:)?//[^\"]*"
)
SECTION = re.compile(r"^## ([^\n]+)$(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
PAGE = re.compile(r"^- \[([^]]+)\]\(([^)#]+)\.md\)", re.MULTILINE)


def add_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """Make tables of contents of the lists of pages: those of index.md by section, and, on a page
    README.md, all pages of its folder. Leave results and the log of changes out of the search."""
    if name == root_doc:
        for title, body in SECTION.findall(source[0]):
            entries = "\n".join(f"{text} <{page}>" for text, page in PAGE.findall(body))
            if entries:
                source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{entries}\n```\n"
    elif name.endswith("/README"):
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"
    if name.startswith(("docs/results/", "CHANGELOG")):
        source[0] = f"---\nnosearch: true\n---\n{source[0]}"


def without_schemas(app: Sphinx, *signatures: Any) -> tuple[str | None, str | None]:
    """A signature without annotations of machine files."""
    signature, returned = signatures[-2:]
    return SCHEMA.sub(r"\1", signature) if signature else signature, returned


def without_fields(app: Sphinx, kind: str, name: str, member: Any, *_: Any) -> bool | None:
    """Leave out the fields of named tuples, which the docstring of their class lists."""
    return True if type(member).__name__ == "_tuplegetter" else None


def finish(app: Sphinx, error: Exception | None) -> None:
    """Lead from the top of the site to its first page; refuse pages that need a network."""
    if error:
        return
    site = Path(app.outdir)
    (site / "index.html").write_text('<meta http-equiv="refresh" content="0; url=docs/index.html">')
    for page in site.rglob("*.html"):
        if fetched := FETCHED.search(page.read_text()):
            raise ExtensionError(f"{page}: required files of the site alone, got {fetched[0]}")


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-signature", without_schemas)
    app.connect("autodoc-skip-member", without_fields)
    app.connect("build-finished", finish)
