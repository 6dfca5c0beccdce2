"""The YAML of machine files: dates are texts, keys are unique, and nesting is shallow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

#: Deepest nesting of blocks and lists; a machine has four levels.
_DEEPEST = 20


class Refused(Exception):
    """Raised for a text that is not YAML or not allowed here; ``where`` names the line."""

    def __init__(self, problem: str, where: str = "file") -> None:
        self.where = where
        super().__init__(problem)


def parse(text: str) -> Any:
    """Parse a text.

    Raises:
        Refused: the text is not YAML, nested too deeply, or has a key twice.
    """
    try:
        depth = 0  # PyYAML crashes the process on very deep nesting
        for event in yaml.parse(text, Loader=_Loader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                raise ValueError(f"nested more than {_DEEPEST} deep")
        return yaml.load(text, Loader=_Loader)  # noqa: S506 (a subclass of SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        raise Refused(problem, f"line {mark.line + 1}" if mark else "file") from None
    except ValueError as error:
        raise Refused(str(error)) from None


def dump(data: Any) -> str:
    """Write data as text."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    return text


if TYPE_CHECKING:
    _FastLoader = yaml.SafeLoader
else:  # the C loader is eight times as fast, if PyYAML was built with it
    _FastLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_FastLoader):
    """A loader that raises on duplicate keys, whose first value would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


# Dates are texts, with or without quotes.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Dumper(yaml.SafeDumper):
    """A dumper that writes mappings over several lines and points of curves on one line."""


def _flow_if_flat(dumper: yaml.SafeDumper, data: list[Any]) -> yaml.Node:
    flat = all(isinstance(entry, (int, float, str)) for entry in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flat)


_Dumper.add_representer(list, _flow_if_flat)
