"""ficco inside other packages. Each module imports its client, and nothing else imports them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import packages_distributions, version


@contextmanager
def client(package: str, release: str) -> Iterator[None]:
    """Context of the imports of a client.

    Args:
        package: import name of the client.
        release: release with which this integration was tested.

    Raises:
        ImportError: the client is not installed, or lacks a module.
    """
    try:
        yield
    except ImportError as error:
        names = sorted(set(packages_distributions().get(package, ())))
        got = ", ".join(f"{name} {version(name)}" for name in names) or "none"
        raise ImportError(
            f"{package}: required release {release} or one that has the same modules, got {got} "
            f"({error}); install that release"
        ) from error
