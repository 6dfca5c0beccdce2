"""What the pages say that can be checked: links, pictures, commands, variables, lists of files."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import ficco
from docs.make import machine_fields, reproduced
from ficco.machine import configs
from ficco.machine.text import parse
from ficco.tools import cli

ROOT = Path(ficco.__file__).resolve().parents[1]
PACKAGE = ROOT / "ficco"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
#: Reports are copied from the machine that wrote them, with commands of that day, and the log of
#: changes names what has gone.
CURRENT = [
    page
    for page in PAGES
    if page.parent.name not in ("results", "simulated") and page.name != "CHANGELOG.md"
]

LINK = re.compile(r"\]\(([^()\s]+)\)")
#: A line that runs ficco: its command and the rest.
COMMAND = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:\S*(?:python[\d.]*|torchrun .*) -m )?ficco ([a-z]+)\b(.*)"
)
#: A script of a checkout that a line runs: its module or its file.
SCRIPT = re.compile(r"python -m ((?:docs|benchmarks)\.[\w.]+)|python (\w+/[\w/]+\.py)")
CODE = re.compile(r"```.*?```|(?:^    [^\n]*\n)+|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """The names by which the headings of a page can be linked, as GitHub makes them."""
    titles = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-") for title in plain}


def broken_links(page: Path) -> list[str]:
    """Links of a page to files or headings that are not there."""
    broken = []
    for link in LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            broken.append(link)
    return broken


def code(page: Path) -> Iterator[str]:
    """The lines of code on a page, comments and prompts taken off."""
    for part in CODE.findall(page.read_text()):
        for line in part.strip("`\n").replace("\\\n", " ").splitlines():
            yield re.sub(r"\s#.*", "", line.strip().removeprefix("$ "))


def commands() -> dict[str, argparse.ArgumentParser]:
    (found,) = (
        action.choices
        for action in cli._parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return found


def unknown(line: str) -> str:
    """What a line of code calls that ficco or make does not have; empty if it has all."""
    words = line.split()
    script = SCRIPT.search(line)
    if script and not (ROOT / (script[2] or f"{script[1].replace('.', '/')}.py")).exists():
        return script[0]
    if "make" in words[:1] and len(words) > 1 and words[1] not in targets():
        return f"make {words[1]}"
    match = COMMAND.match(line)
    if not match:
        return ""
    name, rest = match.groups()
    if name not in commands():
        return f"ficco {name}"
    known = {flag for action in commands()[name]._actions for flag in action.option_strings}
    flags = re.findall(r"(?<!\S)(--[a-z][\w-]*)", rest.split("|")[0])
    return ", ".join(f"ficco {name} {flag}" for flag in flags if flag not in known)


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def invented(text: str) -> list[str]:
    """Addresses of the project's in a text other than the one that pyproject.toml names."""
    named = re.search(r'^Repository = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    addresses = re.findall(r"https?://[^\s()\"'<>]*ficco[^\s()\"'<>]*", text)
    return [one for one in addresses if not (named and one.startswith(named[1]))]


#: Modules whose names a program may import, by the pages of the reference; what needs a client or
#: Triton is read, not imported.
MODULES = re.findall(r"`(ficco[\w.]*)`", (ROOT / "docs" / "api" / "README.md").read_text())
READ = [PACKAGE / "tile.py", *sorted(PACKAGE.glob("integrations/[a-z]*.py"))]


def public() -> Iterator[tuple[str, Any]]:
    """The public names of ficco's own, and what they stand for."""
    for name in MODULES:
        if (PACKAGE.parent / name.replace(".", "/") / "__init__.py").exists():
            module = import_module(name)
            for one in getattr(module, "__all__", ()):
                value = getattr(module, one)
                if getattr(value, "__module__", "ficco").startswith("ficco"):
                    yield f"{name}.{one}", value


def undocumented(value: Any) -> list[str]:
    """What of a function or a class, itself included, has no docstring."""
    if not inspect.isclass(value):
        return [] if inspect.getdoc(value) else [""]
    made = (value.__doc__ or "").startswith(f"{value.__name__}(")  # by dataclass or NamedTuple
    missing = [""] if made or not value.__doc__ else []
    for name, member in vars(value).items():
        function = getattr(member, "__func__", getattr(member, "fget", member))
        if name[0] != "_" and inspect.isfunction(function) and not inspect.getdoc(function):
            missing.append(f".{name}")
    return missing


def undocumented_source(text: str) -> list[str]:
    """The public functions and classes of a module that have no docstring."""
    nodes = [
        node
        for node in ast.parse(text).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != "_"
    ]
    return [node.name for node in nodes if not ast.get_docstring(node)]


def in_the_reference() -> Iterator[Any]:
    """What the pages of the reference show: objects or, of data, the names."""
    for page in (ROOT / "docs" / "api").glob("*.md"):
        text = page.read_text()
        yield from re.findall(r"^\.\. py:data:: ([\w.]+)", text, re.MULTILINE)
        directive = r"^\.\. auto(\w+):: ([\w.]+)((?:\n   :.*)*)"
        for kind, name, options in re.findall(directive, text, re.MULTILINE):
            if name.startswith(("ficco.tile", "ficco.integrations")):
                continue
            if kind != "module":
                module, _, one = name.rpartition(".")
                yield getattr(import_module(module), one)
            elif ":members:" in options:
                module = import_module(name)
                own = [getattr(module, one) for one in getattr(module, "__all__", ())]
                imported = "imported-members" in options
                yield from (
                    one for one in own if imported or getattr(one, "__module__", "") == name
                )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_commands_exist() -> None:
    lines = [line for page in CURRENT for line in code(page)]
    assert [what for line in lines if (what := unknown(line))] == []
    assert len([line for line in lines if COMMAND.match(line)]) > 20


def test_pages_and_pictures_are_linked() -> None:
    links = {
        (page.parent / link.partition("#")[0]).resolve(): page
        for page in PAGES
        for link in LINK.findall(page.read_text())
        if not re.match(r"[a-z]+:|#", link)
    }
    files = [file for kind in ("md", "png", "svg") for file in (ROOT / "docs").rglob(f"*.{kind}")]
    assert [file for file in files if file.resolve() not in links] == []


def test_variables_are_documented_and_read() -> None:
    source = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    read = set(re.findall(r'"(FICCO_[A-Z_]*[A-Z])"', source))
    known = read | set(re.findall(r"FICCO_[A-Z_]*[A-Z]", source))  # some names are put together
    told = set(re.findall(r"FICCO_[A-Z_]*[A-Z]", "".join(page.read_text() for page in CURRENT)))
    told = {name for name in told if not name.startswith("FICCO_TEST")}
    assert read and read - told == set()
    assert told - known == set()


def test_tests_and_files_that_pages_name_exist() -> None:
    tests = "".join(path.read_text() for path in ROOT.glob("tests/*.py"))
    missing = []
    for page in CURRENT:
        text = page.read_text()
        named = re.findall(r"`(test_\w+)`", text)
        missing += [
            name
            for name in named
            if not re.search(rf"def {name}\(|{name}\.py", tests)
            and not (ROOT / "tests" / f"{name}.py").exists()
        ]
        files = re.findall(r"`((?:ficco|tests|configs|benchmarks|examples|docs)/[\w./-]+)`", text)
        missing += [file for file in files if not (ROOT / file).exists()]
    assert missing == []


def test_the_readme_is_short_and_can_be_read_in_a_checkout() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    links = LINK.findall(text)
    assert len([link for link in links if "//" not in link]) > 30
    assert {link for link in links if "//" in link} == {"https://arxiv.org/abs/2512.10236"}
    (example,) = re.findall(r"```python.*?```", text, re.DOTALL)
    assert example in (ROOT / "docs" / "start.md").read_text()


def test_no_address_of_the_project_is_invented() -> None:
    files = [*PAGES, *PACKAGE.rglob("*.py"), *ROOT.glob("examples/*.py"), ROOT / "pyproject.toml"]
    assert [(file, wrong) for file in files if (wrong := invented(file.read_text()))] == []
    address = "https://example.org/ficco/ficco"
    assert invented(f"[page]({address}/a.md) or https://arxiv.org") == [f"{address}/a.md"]


def test_pages_are_plain_markdown() -> None:
    """As a Git host shows them; only the reference has directives of the site's."""
    pages = [page for page in PAGES if page.parent.name != "api"]
    assert [page for page in pages if "```{" in page.read_text()] == []


@pytest.mark.parametrize("name", ["amd.md", "amd-setup.md", "choosing.md"])
def test_a_page_begins_with_ten_lines(name: str) -> None:
    top = (ROOT / "docs" / name).read_text().split("\n## ")[0]
    assert re.findall(r"^(\d+)\. ", top, re.MULTILINE) == [str(i) for i in range(1, 11)]


def test_public_names_have_docstrings() -> None:
    values = {name: value for name, value in public() if callable(value)}
    values |= {
        f"{one.__module__}.{one.__qualname__}": one
        for one in in_the_reference()
        if inspect.isclass(one)
    }
    missing = [name + part for name, value in values.items() for part in undocumented(value)]
    missing += [
        f"{path.stem}.{name}" for path in READ for name in undocumented_source(path.read_text())
    ]
    assert missing == []
    assert len(READ) >= 5 and len(values) > 80


def test_public_names_are_in_the_reference() -> None:
    shown = [*in_the_reference()]
    names = {one for one in shown if isinstance(one, str)}
    there = {id(one) for one in shown if callable(one)}
    missing = [
        name
        for name, value in public()
        if name not in names and not (callable(value) and id(value) in there)
    ]
    assert missing == []


def test_the_page_of_the_machine_file_has_every_key() -> None:
    page = (ROOT / "docs" / "machine-file.md").read_text()
    for name, text in (("fields", machine_fields.text()), ("shipped", machine_fields.shipped())):
        marked = f"<!-- {name}:begin -->\n{text}\n<!-- {name}:end -->"
        assert marked in page, "python -m docs.make.machine_fields"


def test_the_page_of_the_machine_file_says_who_measures() -> None:
    """By a file that `ficco tune` wrote on a host that was new to ficco."""
    written = parse((configs() / "h100-2.yaml").read_text())
    by_hand = []
    for kind, names in machine_fields.blocks().items():
        said = machine_fields.sources(kind)
        for name in names:
            by_hand += [key for key in written.get(name, ()) if said.get(key) == "by hand"]
            left = {key for key, who in said.items() if who != "by hand"} - {
                *written.get(name, said)
            }
            # Two ranks share no port, and one mover has no product to be in front of.
            assert left <= {"sharing", "in_front"}, (name, left)
    assert by_hand == []


@pytest.mark.slow
def test_the_page_of_the_paper_holds_what_the_results_say() -> None:
    page = (ROOT / "docs" / "paper.md").read_text()
    for name, text in reproduced.tables().items():
        marked = f"<!-- {name}:begin -->\n{text}\n<!-- {name}:end -->"
        assert marked in page, "python -m docs.make.reproduced"


@pytest.mark.parametrize("folder", ["tools/bench", "compute", "dma", "runtime"])
def test_a_table_of_modules_has_all_of_them(folder: str) -> None:
    table = str(ast.get_docstring(ast.parse((PACKAGE / folder / "__init__.py").read_text())))
    rows = re.findall(r"^([a-z_]+(?:, [a-z_]+)*)  +\S", table, re.MULTILINE)
    named = {name for row in rows for name in row.split(", ") if name != "module"}
    in_prose = set(re.findall(r"``([a-z_]+)``", table))
    there = {path.stem for path in PACKAGE.glob(f"{folder}/*.py") if path.stem[0] != "_"}
    assert named <= there <= named | in_prose


def test_what_is_wrong_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# The `one` heading\n[a](none.md) [b](page.md#the-one-heading) [c](#other)\n")
    assert broken_links(page) == ["none.md", "#other"]
    page.write_text("Run `ficco plan growing --m 3` or\n\n    A=1 ficco plam x  # this\n\n")
    assert [unknown(line) for line in code(page)] == ["", "ficco plam"]
    for line, wrong in (
        ("ficco bench --no-such 3 | head", "ficco bench --no-such"),
        ("python -m ficco demo --nothing", "ficco demo --nothing"),
        ("make tset", "make tset"),
        ("make test PYTHON=python3.12", ""),
        ("python -m docs.make.none docs", "python -m docs.make.none"),
        ("python tests/none.py", "python tests/none.py"),
        ("A=1 python benchmarks/paired_host_time.py BASE NEW", ""),
        ("from ficco import bench", ""),
    ):
        assert unknown(line) == wrong, line
