"""Checks of `python -m docs.make.check` and `python -m docs.make.language`."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_all_gather_matmul import end_of, start_ranks

from docs.make import check, language


@pytest.mark.slow
@pytest.mark.parametrize("page", check.USER_PAGES, ids=lambda page: page.stem)
def test_the_program_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    script = f"import torch\ntorch.set_num_threads(1)\n{check.program(page)}"  # ranks share cores
    ended = end_of(start_ranks(tmp_path, script, 2), 120)
    assert not any(rank.code for rank in ended), ended


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("ficco plan growing --m 3", ""),
        ("ficco plam x", "ficco plam"),
        ("ficco bench --no-such 3 | head", "ficco bench --no-such"),
        ("python -m ficco demo --nothing", "ficco demo --nothing"),
        ("make tset", "make tset"),
        ("make test PYTHON=python3.12", ""),
        ("python -m docs.make.none docs", "python -m docs.make.none"),
        ("python tests/none.py", "python tests/none.py"),
        ("A=1 python benchmarks/paired_host_time.py BASE NEW", ""),
        ("from ficco import bench", ""),
    ],
)
def test_commands_that_do_not_exist(line: str, wrong: str) -> None:
    assert check.unknown(line) == wrong


def test_links_code_and_addresses(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# The `one` heading\n[a](none.md) [b](page.md#the-one-heading) [c](#other)\n")
    broken = [f"{page}: {link} leads nowhere" for link in ("none.md", "#other")]
    assert [*check.broken_links(page)] == broken
    page.write_text("Run `ficco plan growing --m 3` or\n\n    A=1 ficco plam x  # this\n\n")
    assert [*check.code(page)] == ["ficco plan growing --m 3", "A=1 ficco plam x "]
    page.write_text("`test_of_nothing` tests `ficco/none.py`")
    assert len([*check.names(page)]) == 2
    address = "https://example.org/ficco/ficco"
    assert check.invented(f"[page]({address}/a.md) or https://arxiv.org") == [f"{address}/a.md"]


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("page.md", "Rows travel.\n\n```\nWhat is code\n```\nWhat a rank sends.\n", [6]),
        ("page.md", "Rows of the peers travel with theirs.\n", [1]),
        ("page.md", "`What is` code; which rows travel is known to so many ranks.\n", [1]),
        ("a.py", 'def _made(told):\n    """Send a row."""\n    # Of what they are.\n', [3, 1, 1]),
        ("a.py", '"""Rows."""\nplan.kept = 1\nfor found in ():\n    pass\n', [2, 3]),
        ("a.py", '"""Which row to send.\n\nWhy?\n"""\nfound.append(1)\n', [1]),
    ],
)
def test_language(name: str, text: str, lines: list[int], tmp_path: Path) -> None:
    page = tmp_path / name
    page.write_text(text)
    assert [match.place for match in language.matches(page)] == [f"{page}:{i}" for i in lines]


SCRIPTS = {path.stem: path for path in Path(check.__file__).parent.glob("[!_]*.py")}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_prints_its_help(name: str, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("sys.argv", [name, "--help"])
    monkeypatch.setattr("pathlib.Path.write_text", lambda *_: pytest.fail("wrote a page"))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPTS[name]), run_name="__main__")
    assert (ended.value.code, capsys.readouterr().out[:6]) == (0, "usage:")


@pytest.mark.parametrize(
    ("name", "page", "text"),
    [
        ("tables", "api/machine-file.md", "| `name` |"),
        ("tables", "../README.md", "times as fast"),
        ("tables", "overlap.svg", "own shard"),
        ("forms", "amd.md", "\n7. "),
    ],
)
def test_a_changed_page(name: str, page: str, text: str, tmp_path: Path, monkeypatch: Any) -> None:
    docs = tmp_path / "docs"
    (docs / "api").mkdir(parents=True)
    for path in (*check.DOCS.iterdir(), *(check.DOCS / "api").iterdir()):
        if path.name != "api":
            (docs / path.relative_to(check.DOCS)).symlink_to(path)
    (tmp_path / "README.md").symlink_to(check.ROOT / "README.md")
    monkeypatch.setattr(check, "DOCS", docs)
    run: Callable[[], Iterator[str]] = getattr(check, name)
    (docs / page).unlink()
    original = (check.ROOT / "docs" / page).read_text()
    assert text in original
    (docs / page).write_text(original.replace(text, "other"))
    assert page in next(run())
