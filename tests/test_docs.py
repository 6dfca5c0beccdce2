"""What the pages say that can be checked: links, pictures, commands, variables, lists of files."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ficco
from ficco import cli

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
        files = re.findall(r"`((?:ficco|tests|configs|tools|examples|docs)/[\w./-]+)`", text)
        missing += [file for file in files if not (ROOT / file).exists()]
    assert missing == []


@pytest.mark.parametrize("folder", ["bench", "dma"])
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
        ("from ficco import bench", ""),
    ):
        assert unknown(line) == wrong, line
