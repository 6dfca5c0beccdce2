"""Check the pages: links, commands, names, and the tables that scripts write.

python -m docs.make.check

prints a line for each error and exits with status 1 if there are errors. `make docs` runs it.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from docs.make import (
    hosts_layers,
    machine_fields,
    overlap,
    paper,
    parsed,
    readme,
    regret,
    reproduced,
    rule_table,
)
from ficco.errors import ConfigError
from ficco.machine import Machine, configs, find
from ficco.machine.text import parse
from ficco.tools import cli
from ficco.tools.bench import report
from ficco.tools.bench.cases import scenarios
from ficco.tools.bench.frames import BENCH, REPLAY, Schema, append, read_description, schema_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, DOCS, RESULTS = ROOT / "ficco", ROOT / "docs", ROOT / "docs" / "results"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
#: Pages that describe the present code. Reports keep the commands of the day they were measured;
#: the change log names removed features.
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
VARIABLE = re.compile(r"FICCO_[A-Z_]*[A-Z]")
#: Lines that README.md may have, and its links to other hosts.
README_LINES, ELSEWHERE = 90, {"https://arxiv.org/abs/2512.10236"}
#: Pages for users. Each begins with a program, which a test runs.
USER_PAGES = [
    DOCS / f"{name}.md"
    for name in "start operators modules compile attention experts fp8 arriving hosts limits "
    "troubleshooting migration clients/README tuning own-schedules glossary".split()
]
#: Lines that such a page may have.
USER_LINES = 120
#: Bytes that the committed files of a folder may have.
LIMITS = {RESULTS: 6_000_000, ROOT: 12_000_000}
#: A path of the machine that wrote a report.
ABSOLUTE = re.compile(r"(?<![\w.:/])/[\w./-]+/(?:ficco|configs|docs|tests)/")
#: Benches whose reports have text of an author, or compare files.
BY_HAND = ("serial-by-kernel-before-h200-4", "timeline-h200-2")


# Links.


def anchors(text: str) -> set[str]:
    """Anchors of the headings of a page, by GitHub's rule."""
    titles = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-") for title in plain}


def links(text: str) -> list[str]:
    """Links of a page to files and headings of the project."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [link for link in LINK.findall(prose) if not re.match(r"[a-z]+:", link)]


def broken_links(page: Path) -> Iterator[str]:
    for link in links(page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            yield f"{page}: {link} leads nowhere"


def unlinked() -> Iterator[str]:
    """Pages, pictures and results without a link to them or to the page of their bench."""
    linked = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in PAGES
        for link in LINK.findall(page.read_text())
        if not re.match(r"[a-z]+:|#", link)
    }
    for kind in ("md", "png", "svg", "csv", "json", "yaml"):
        for path in DOCS.rglob(f"*.{kind}"):
            bench = path.with_name(re.sub(r"(_[a-z]+)?\.(csv|json|yaml)$", ".md", path.name))
            if not {path, bench, path.with_suffix(".csv")} & linked:
                yield f"{path}: no page links it"


def sizes() -> Iterator[str]:
    """Results and a checkout that are too large."""
    files = subprocess.check_output(["git", "-C", str(ROOT), "ls-files", "-z"], text=True)
    tracked = [ROOT / name for name in files.strip("\0").split("\0")]
    for folder, limit in LIMITS.items():
        size = sum(path.stat().st_size for path in tracked if path.is_relative_to(folder))
        if size > limit:
            yield f"{folder}: required {limit} bytes, got {size}: python -m docs.make.trim"


def invented(text: str) -> list[str]:
    """Addresses of the project in a text that differ from pyproject.toml's."""
    named = re.search(r'^Repository = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    addresses = re.findall(r"https?://[^\s()\"'<>]*ficco[^\s()\"'<>]*", text)
    return [one for one in addresses if not (named and one.startswith(named[1]))]


def addresses() -> Iterator[str]:
    files = [*PAGES, *PACKAGE.rglob("*.py"), *ROOT.glob("examples/*.py"), ROOT / "pyproject.toml"]
    for file in files:
        yield from (f"{file}: {one} is no address" for one in invented(file.read_text()))


# Code.


def code(page: Path) -> Iterator[str]:
    """Lines of code on a page, without comments and prompts."""
    for part in CODE.findall(page.read_text()):
        for line in part.strip("`\n").replace("\\\n", " ").splitlines():
            yield re.sub(r"\s#.*", "", line.strip().removeprefix("$ "))


def commands() -> dict[str, argparse.ArgumentParser]:
    (choices,) = (
        action.choices
        for action in cli._parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return choices


def unknown(line: str) -> str:
    """The unknown command, option or script in a line of code; empty if all exist."""
    words = line.split()
    script = SCRIPT.search(line)
    if script and not (ROOT / (script[2] or f"{script[1].replace('.', '/')}.py")).exists():
        return script[0]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    if "make" in words[:1] and len(words) > 1 and words[1] not in targets:
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


def variables() -> Iterator[str]:
    """Environment variables that are undocumented, or documented but never read."""
    source = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    read = set(re.findall(rf'"({VARIABLE.pattern})"', source))
    known = set(VARIABLE.findall(source))  # some names are put together
    documented = set(VARIABLE.findall("".join(page.read_text() for page in CURRENT)))
    yield from (f"{name} is on no page" for name in sorted(read - documented))
    for name in sorted(documented - known):
        if not name.startswith("FICCO_TEST"):
            yield f"{name} is on a page, and nothing reads it"


def names(page: Path) -> Iterator[str]:
    """Tests and files that a page names but that do not exist."""
    text = page.read_text()
    tests = "".join(path.read_text() for path in ROOT.glob("tests/**/*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        if f"def {name}(" not in tests and not [*ROOT.glob(f"tests/**/{name}.py")]:
            yield f"{page}: there is no {name}"
    for file in re.findall(r"`((?:ficco|tests|configs|benchmarks|examples|docs)/[\w./-]+)`", text):
        if not (ROOT / file).exists():
            yield f"{page}: there is no {file}"


# Forms.


def program(page: Path) -> str:
    """The Python program at the top of a page, before its first section; empty if it has none."""
    top = page.read_text().split("\n## ")[0]
    return "".join(re.findall(r"```python\n(.*?)```", top, re.DOTALL)[:1])


def forms() -> Iterator[str]:
    """Pages are Markdown as a Git host shows it, short where a user begins."""
    for page in PAGES:
        if page.parent.name != "api" and "```{" in page.read_text():
            yield f"{page}: only the reference has directives"
    text = (ROOT / "README.md").read_text()
    if len(text.splitlines()) > README_LINES:
        yield f"README.md has more than {README_LINES} lines"
    if (others := {link for link in LINK.findall(text) if "//" in link}) != ELSEWHERE:
        yield f"README.md links {others}"
    if re.findall(r"```python.*?```", text, re.DOTALL)[0] not in (DOCS / "start.md").read_text():
        yield "docs/start.md lacks the example of README.md"
    for page in USER_PAGES:
        if not program(page) or len(page.read_text().splitlines()) > USER_LINES:
            yield f"{page}: required a program at the top and at most {USER_LINES} lines"
    for name in ("amd.md", "amd-setup.md", "choosing.md"):
        top = (DOCS / name).read_text().split("\n## ")[0]
        if re.findall(r"^(\d+)\. ", top, re.MULTILINE) != [str(i) for i in range(1, 11)]:
            yield f"docs/{name} does not begin with ten lines"


def modules() -> Iterator[str]:
    """Tables of modules in docstrings that miss a module or list a removed one."""
    for folder in ("tools/bench", "compute", "dma", "runtime"):
        table = str(ast.get_docstring(ast.parse((PACKAGE / folder / "__init__.py").read_text())))
        rows = re.findall(r"^([a-z_]+(?:, [a-z_]+)*)  +\S", table, re.MULTILINE)
        rows_name = {name for row in rows for name in row.split(", ") if name != "module"}
        in_prose = set(re.findall(r"``([a-z_]+)``", table))
        files = {path.stem for path in PACKAGE.glob(f"{folder}/*.py") if path.stem[0] != "_"}
        wrong = (rows_name - files) | (files - rows_name - in_prose)
        yield from (f"the docstring of {folder} is wrong about {one}" for one in sorted(wrong))


# The reference.


def public() -> Iterator[tuple[str, Any]]:
    """Public names defined in ficco, with their objects, of the modules in the API reference."""
    for name in re.findall(r"`(ficco[\w.]*)`", (DOCS / "api" / "README.md").read_text()):
        if (ROOT / name.replace(".", "/") / "__init__.py").exists():
            module = import_module(name)
            for one in getattr(module, "__all__", ()):
                value = getattr(module, one)
                if getattr(value, "__module__", "ficco").startswith("ficco"):
                    yield f"{name}.{one}", value


def undocumented(value: Any) -> list[str]:
    """Suffixes of the names without a docstring: ``""`` for the object, ``.name`` for a member."""
    if not inspect.isclass(value):
        return [] if inspect.getdoc(value) else [""]
    generated = (value.__doc__ or "").startswith(f"{value.__name__}(")  # by dataclass, NamedTuple
    missing = [""] if generated or not value.__doc__ else []
    for name, member in vars(value).items():
        function = getattr(member, "__func__", getattr(member, "fget", member))
        if name[0] != "_" and inspect.isfunction(function) and not inspect.getdoc(function):
            missing.append(f".{name}")
    return missing


def undocumented_source(text: str) -> list[str]:
    """Public functions and classes of a module without a docstring."""
    nodes = [
        node
        for node in ast.parse(text).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != "_"
    ]
    return [node.name for node in nodes if not ast.get_docstring(node)]


def shown() -> Iterator[Any]:
    """Objects in the API reference, or the names of data, without modules that need a client or
    Triton."""
    directive = r"^\.\. auto(\w+):: ([\w.]+)((?:\n   :.*)*)"
    for page in (DOCS / "api").glob("*.md"):
        text = page.read_text()
        yield from re.findall(r"^\.\. py:data:: ([\w.]+)", text, re.MULTILINE)
        for kind, name, options in re.findall(directive, text, re.MULTILINE):
            if name.startswith(("ficco.tile", "ficco.integrations")):
                continue
            if kind != "module":
                module, _, one = name.rpartition(".")
                yield getattr(import_module(module), one)
            elif ":members:" in options:
                members = import_module(name)
                own = [getattr(members, one) for one in getattr(members, "__all__", ())]
                imported = "imported-members" in options
                yield from (
                    one for one in own if imported or getattr(one, "__module__", "") == name
                )


def reference() -> Iterator[str]:
    """Public names without a docstring or without a place in the reference."""
    values, documented = dict(public()), [*shown()]
    data = {one for one in documented if isinstance(one, str)}
    objects = {id(one) for one in documented if callable(one)}
    for name, value in values.items():
        if name not in data and not (callable(value) and id(value) in objects):
            yield f"{name} is not in docs/api"
    classes = {
        f"{one.__module__}.{one.__qualname__}": one for one in documented if inspect.isclass(one)
    }
    for name, value in {**values, **classes}.items():
        if callable(value):
            yield from (f"{name}{part} has no docstring" for part in undocumented(value))
    for path in (PACKAGE / "tile.py", *PACKAGE.glob("integrations/[a-z]*.py")):
        for name in undocumented_source(path.read_text()):
            yield f"{path.stem}.{name} has no docstring"


# Tables that scripts write.


def machine(name: str) -> Machine:
    one = find(name, None)
    assert one is not None, name
    return one


def tables() -> Iterator[str]:
    """Tables that are not what their script writes today."""
    for name, text in (("fields", machine_fields.text()), ("shipped", machine_fields.shipped())):
        yield from _between("api/machine-file.md", name, text, "machine_fields")
    for (page, name), text in reproduced.tables().items():
        yield from _between(page, name, text, "reproduced")
    for page, text in readme.tables().items():
        yield from _between(page, "results", text, "readme")
    if (DOCS / "overlap.svg").read_text() != overlap.text():
        yield "docs/overlap.svg is old: python -m docs.make.overlap"
    rule = rule_table.rule_table(machine(rule_table.MACHINE), scenarios())
    if rule not in (DOCS / "results/choosing.md").read_text():
        yield "docs/results/choosing.md is old: python -m docs.make.rule_table"


def _between(page: str, name: str, text: str, script: str) -> Iterator[str]:
    marked = f"<!-- {name}:begin -->\n{text}\n<!-- {name}:end -->"
    if marked not in (DOCS / page).read_text():
        yield f"docs/{page} is old: python -m docs.make.{script}"


def sources() -> Iterator[str]:
    """Keys of machine files whose documented source is not where `ficco tune` gets them."""
    files = [parse((configs() / f"{name}-2.yaml").read_text()) for name in ("h100", "h200")]
    for kind, blocks in machine_fields.blocks().items():
        who = machine_fields.sources(kind)
        for block in blocks:
            having = [written[block] for written in files if block in written]
            keys = {key for one in having or [who] for key in one}
            by_hand = {key for one in having for key in one if who.get(key) == "by hand"}
            # Two ranks share no port, one mover has no product to be in front of, and one dtype has
            # the default share.
            left = {key for key, one in who.items() if one != "by hand"} - keys
            for key in sorted(by_hand | (left - {"sharing", "in_front"})):
                if (block, key) == ("tiled", "shares"):
                    continue
                yield f"docs/api/machine-file.md is wrong about who gives {block}.{key}"


def header(path: Path) -> list[str]:
    """Columns of a CSV file."""
    return path.read_text().partition("\n")[0].split(",")


def result_files() -> Iterator[tuple[Path, Schema]]:
    """Result files of the bench, each with its kind."""
    for path in sorted(RESULTS.glob("*.csv")):
        with suppress(ConfigError):
            yield path, schema_of(path)


def results() -> Iterator[str]:
    """Reports that their rows do not reproduce, or that lack their origin."""
    with tempfile.TemporaryDirectory() as folder:
        for path, schema in result_files():
            rows = schema.read(path)
            again = append(Path(folder, path.name), rows[header(path)])
            if again.read_bytes() != path.read_bytes():
                yield f"{path} is not what is read of it"
            pictures = sorted(RESULTS.glob(f"{path.stem}_*.png"))
            reported = schema in (BENCH, REPLAY) and path.stem not in BY_HAND
            page, about = path.with_suffix(".md"), read_description(path)
            if reported and regret.measured_part(page.read_text()) != report.report(
                rows, about, path.stem, pictures
            ):
                yield f"{page} is not the report of its rows"
        paper.write_report(machine("mi300x-8"), Path(folder, "page.md"), "a command")
        simulated = Path("simulated", "mi300x-8.csv")
        if Path(folder, simulated).read_bytes() != (RESULTS / simulated).read_bytes():
            yield "docs/results/simulated/mi300x-8.csv is old: python -m docs.make.paper"
    for page in RESULTS.iterdir():
        if page.suffix in (".md", ".json") and (path := ABSOLUTE.search(page.read_text())):
            yield f"{page} names {path[0]}, of the machine that wrote it"
    for page in RESULTS.glob("*.md"):
        _, section, text = page.read_text().partition(f"\n{regret.TITLE}\n")
        if not section:
            continue
        top, name = text.split("### ")[0], page.stem
        date = read_description(page.with_suffix(".csv"))["date"]
        for words in (
            r"\*\*Recomputed, .*ficco \S+, commit [0-9a-f]{7,}\S*, decided",
            r"`h[12]00-[24]` \(digest [0-9a-f]{10}\)",
            re.escape(f"[`{name}.csv`]({name}.csv), measured {date}."),
        ):
            if not re.search(words, top):
                yield f"{page} does not say {words}"


def over_hosts() -> Iterator[str]:
    """One line of the page of layers over hosts. The whole page would take a minute."""
    model = hosts_layers.MODELS[1]
    one, two = (hosts_layers.layer(machine("h100-8"), model, 8192, world) for world in (8, 16))
    figures = f"{two.serial * 1e3:.2f} | {two.auto * 1e3:.2f} | {two.gemm * 1e3:.2f}"
    gains = f"{two.serial / two.auto:.2f} | {one.auto / two.auto:.2f}"
    row = f"| {model.name} | 8192 | 16 on 2 | {figures} | {gains} |"
    if row not in (RESULTS / "hosts-simulated.md").read_text():
        yield "docs/results/hosts-simulated.md is old: python -m docs.make.hosts_layers"


def problems() -> Iterator[str]:
    """Errors of the pages, as sentences."""
    for page in PAGES:
        yield from broken_links(page)
    for page in CURRENT:
        yield from (f"{page}: there is no {name}" for line in code(page) if (name := unknown(line)))
        yield from names(page)
    for check in (
        *(
            unlinked,
            sizes,
            addresses,
            variables,
            forms,
            modules,
            reference,
            tables,
            sources,
            results,
        ),
        over_hosts,
    ):
        yield from check()


def main() -> int:
    wrong = [*problems()]
    for problem in wrong:
        print(problem.replace(f"{ROOT}/", ""))
    print(f"{len(PAGES)} pages checked, {len(wrong) or 'nothing'} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    parsed(__doc__)
    sys.exit(main())
