"""Settings of the documentation site, which ``make docs`` builds from the pages as they are.

The pages are plain Markdown, with relative links that a Git host follows, too. Only pages of the
API reference have directives of Sphinx's, in fenced blocks.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.ext.autodoc.mock import mock, undecorate

import ficco

project, author = "ficco", "The ficco authors"
release = ficco.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]

# The source folder is the root of the repository, so that pages can link to files outside docs/.
root_doc = "docs/index"
# CHANGELOG, CODE_OF_CONDUCT, CONTRIBUTING, SECURITY, THIRD_PARTY
include_patterns = ["docs/**.md", "[CST]*.md"]
exclude_patterns = [".*", "build", "dist", "ficco", "tests", "benchmarks", "examples", "configs"]

# Anchors as a Git host makes them; links to others are warnings, and warnings are errors.
myst_heading_anchors = 4
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!ficco\.).*")]  # other projects' names
nitpick_ignore = [
    ("py:class", "ficco.ops.routing.Placed"),  # of a class that users do not make
    ("py:class", "ficco.nn.training.Module"),  # a type variable
    ("py:class", "ficco.options.Changes"),  # the fields of ficco.Options as keywords
]

autodoc_mock_imports = ["megatron", "spmd_types", "torchtitan", "transformers", "triton", "vllm"]
autodoc_member_order = "bysource"
napoleon_numpy_docstring = napoleon_use_param = False
napoleon_custom_sections = [("Attributes", "params_style")]
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

smartquotes_action = "D"  # dashes, not quotes: texts stay as they are
html_theme = "furo"
html_title = f"ficco {release}"
html_static_path, html_css_files, templates_path = ["static"], ["site.css"], ["templates"]
html_theme_options = {
    f"{mode}_css_variables": {"color-brand-primary": colour, "color-brand-content": colour}
    for mode, colour in (("light", "#2a5d8f"), ("dark", "#6f9fca"))
}
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
LINK = re.compile(r"\]\((?!\w+:|#)")
PAGE = re.compile(r"^- \[([^]]+)\]\(([^)#]+)\.md\)", re.MULTILINE)


def is_result(name: str) -> bool:
    """Whether a page has measured results, which have a search of their own."""
    return name.startswith("docs/results/")


def add_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """Begin the home page as README.md begins. Make tables of contents of the lists of pages: those
    of index.md by section, and, on a page README.md, all pages of its folder. Leave results and the
    log of changes out of the search."""
    if name == root_doc:
        source[0] = introduction() + source[0][source[0].index("\n## ") :]
        for title, body in SECTION.findall(source[0]):
            entries = "\n".join(f"{text} <{page}>" for text, page in PAGE.findall(body))
            if entries:
                source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{entries}\n```\n"
    elif name.endswith("/README"):
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"
    if is_result(name) or name == "CHANGELOG":
        source[0] = f"---\nnosearch: true\n---\n{source[0]}"


def introduction() -> str:
    """README.md up to the section of its first program, with links as of a page in docs/."""
    text = Path(__file__).parents[1].joinpath("README.md").read_text()
    end = text.index("\n## ", text.index("```python"))
    return LINK.sub("](../", text[:end]).replace("](../docs/", "](")


def without_schemas(app: Sphinx, *signatures: Any) -> tuple[str | None, str | None]:
    """A signature without annotations of machine files."""
    signature, returned = signatures[-2:]
    return SCHEMA.sub(r"\1", signature) if signature else signature, returned


def without_fields(app: Sphinx, kind: str, name: str, member: Any, *_: Any) -> bool | None:
    """Leave out the fields of named tuples, which the docstring of their class lists."""
    return True if type(member).__name__ == "_tuplegetter" else None


def fold_overloads(app: Sphinx, document: nodes.document) -> None:
    """Show one signature of a function, and folded below it how the overloads differ from it."""
    for entry in document.findall(addnodes.desc):
        first, *overloads = (one for one in entry if isinstance(one, addnodes.desc_signature))
        if not overloads:
            continue
        shown = {one.astext() for one in first.findall(addnodes.desc_parameter)}
        lines = nodes.bullet_list()
        for overload in overloads:
            entry.remove(overload)
            texts = [one.astext() for one in overload.findall(addnodes.desc_parameter)]
            (returned,) = overload.findall(addnodes.desc_returns)
            text = f"{', '.join(one for one in texts if one not in shown)}{returned.astext()}"
            lines += nodes.list_item("", nodes.paragraph("", "", nodes.literal(text=text)))
        opened = nodes.raw("", "<details><summary>Overloads</summary>", format="html")
        entry[-1][0:0] = [opened, lines, nodes.raw("", "</details>", format="html")]


def add_pages(app: Sphinx) -> list[tuple[str, dict[str, Any], str]]:
    """The page that searches in results."""
    return [("results-search", {}, "results-search.html")]


def index_results(app: Sphinx) -> None:
    """Write the index of the search in results: title, address and words of each page."""
    env = app.env
    index = [
        [
            env.titles[name].astext(),
            app.builder.get_target_uri(name),
            " ".join(sorted({*env.get_doctree(name).astext().lower().split()})),
        ]
        for name in sorted(filter(is_result, env.found_docs))
    ]
    Path(app.outdir, "results-index.js").write_text(f"const RESULTS = {json.dumps(index)};")


def finish(app: Sphinx, error: Exception | None) -> None:
    """Lead from the top of the site to its first page; refuse pages that need a network."""
    if error:
        return
    index_results(app)
    site = Path(app.outdir)
    (site / "index.html").write_text('<meta http-equiv="refresh" content="0; url=docs/index.html">')
    for page in site.rglob("*.html"):
        if fetched := FETCHED.search(page.read_text()):
            raise ExtensionError(f"{page}: required files of the site alone, got {fetched[0]}")


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-signature", without_schemas)
    app.connect("autodoc-skip-member", without_fields)
    app.connect("doctree-read", fold_overloads)
    app.connect("html-collect-pages", add_pages)
    app.connect("build-finished", finish)
