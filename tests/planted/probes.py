"""A plugin of pytest that records which tests reach the code of each mutant.

The file is copied to the root of a copy of the tree, so that code there can call :func:`hit`.
Caches are emptied before each test: what one test has cached the next does not reach.
"""

from __future__ import annotations

import functools
import os
from typing import Any, TypeVar

T = TypeVar("T")

#: Files whose lines are "number of a mutant, tab, test"; the process that runs the tests.
RECORD, RUNNER = "PROBES_RECORD", "PROBES_RUNNER"
#: In place of a test: the code was reached by a process of ranks, or before the first test.
RANKS, IMPORTS = "ranks", "imports"

_lru_cache: Any = functools.lru_cache
_caches: list[Any] = []
_seen: set[tuple[int, str]] = set()


def hit(number: int, value: T) -> T:
    """The value, whose computation is what a mutant changes."""
    environment = os.environ
    test = environment.get("PYTEST_CURRENT_TEST", IMPORTS)
    if environment.get(RUNNER) != str(os.getpid()):
        test = RANKS
    if (number, test) not in _seen:
        _seen.add((number, test))
        with open(environment[RECORD], "a") as record:
            record.write(f"{number}\t{test.rpartition(' (')[0] or test}\n")
    return value


def _recorded(*sizes: Any, **options: Any) -> Any:
    made = _lru_cache(*sizes, **options)
    if sizes and callable(sizes[0]):
        _caches.append(made)
        return made

    def decorate(function: Any) -> Any:
        _caches.append(made(function))
        return _caches[-1]

    return decorate


def pytest_configure() -> None:
    os.environ[RUNNER] = str(os.getpid())


def pytest_runtest_setup() -> None:
    for cache in _caches:
        cache.cache_clear()


if RECORD in os.environ and RUNNER not in os.environ:  # not in processes of ranks
    functools.lru_cache = _recorded
    functools.cache = _recorded
