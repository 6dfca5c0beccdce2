"""The description of a wheel: README.md with links that work outside the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

#: A picture or a link in Markdown to a file of the repository.
PICTURE = re.compile(r"!\[([^]]*)\]\((?!\w+:|#)([^\s()]+)\)")
LINK = re.compile(r"(?<!!)\[([^]]*)\]\((?!\w+:|#)([^\s()]+)\)")

#: Ends a description without links.
PAGES = "\nA checkout of the repository has the pages that this text names in `docs/`.\n"


def description(readme: str, repository: str) -> str:
    """The README with links to the repository at an address; without an address, without pictures
    and with the texts of links only."""
    if repository:
        readme = PICTURE.sub(rf"![\1]({repository}/raw/main/\2)", readme)
        return LINK.sub(rf"[\1]({repository}/blob/main/\2)", readme)
    return LINK.sub(r"\1", PICTURE.sub("", readme)) + PAGES


class CustomMetadataHook(MetadataHookInterface):
    """Sets the description, which pyproject.toml declares as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        readme = (Path(self.root) / "README.md").read_text()
        repository = metadata.get("urls", {}).get("Repository", "")
        text = description(readme, repository)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
