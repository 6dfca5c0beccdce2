"""YAML as machine files use it: dates are texts, keys are given once, nothing is nested deeply."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

#: Blocks and lists within each other; a machine has four.
_DEEPEST = 20


class Refused(Exception):
    """A text that is no YAML, or none that a machine is written in; ``where`` names the line."""

    def __init__(self, what: str, where: str = "file") -> None:
        self.where = where
        super().__init__(what)


def parse(text: str) -> Any:
    """The data of a text.

    Raises:
        Refused: what is wrong, and where.
    """
    try:
        depth = 0  # PyYAML ends the process where it is far too deep
        for event in yaml.parse(text, Loader=_Loader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                raise ValueError(f"nested more than {_DEEPEST} deep")
        return yaml.load(text, Loader=_Loader)  # noqa: S506 (a subclass of SafeLoader)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or str(error)
        raise Refused(what, f"line {where.line + 1}" if where else "file") from None
    except ValueError as error:
        raise Refused(str(error)) from None


def dump(data: Any) -> str:
    """The text of data."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    return text


if TYPE_CHECKING:
    _FastLoader = yaml.SafeLoader
else:  # eight times as fast, where PyYAML was built with it
    _FastLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_FastLoader):
    """Refuses keys that are given twice: the first would be lost."""

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


# A date is a text here, whether it is in quotes or not.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Dumper(yaml.SafeDumper):
    """Mappings over lines, points of curves on one."""


def _flow_if_flat(dumper: yaml.SafeDumper, data: list[Any]) -> yaml.Node:
    flat = all(isinstance(item, (int, float, str)) for item in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flat)


_Dumper.add_representer(list, _flow_if_flat)
