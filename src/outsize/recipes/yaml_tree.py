"""YAML as plain values that still know their lines: the safe subset a recipe needs, and nothing surprising.

PyYAML's own resolver follows YAML 1.1, where `no` is false, `1:30` is ninety and `1e-8` is text. Here the core schema
of YAML 1.2 holds: null, true and false, whole numbers, floats (with or without a dot), and everything else is text.
Keys given twice, tags and values that contain themselves are faults.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from outsize.base.errors import RecipeError

_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan")


class _Loader(yaml.SafeLoader):
    """Scanner and parser of PyYAML with the implicit types of YAML 1.2's core schema."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's own way to declare them; filled below, then only read


for _name, _pattern, _first in (
    ("null", re.compile(r"~|null|Null|NULL|"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"true|True|TRUE|false|False|FALSE"), list("tTfF")),
    ("int", _INT, list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
):
    _whole = re.compile(rf"(?:{_pattern.pattern})\Z")
    _Loader.add_implicit_resolver(_TAG + _name, _whole, _first)


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong with a recipe; line counts from 1, None when it did not come from a file."""

    line: int | None
    where: str
    message: str

    def __str__(self) -> str:
        place = "" if self.line is None else f"line {self.line}: "
        return f"{place}{self.where + ': ' if self.where else ''}{self.message}"


@dataclass(frozen=True)
class Tree:
    """A parsed document: its values, its faults so far, and where everything stands."""

    root: yaml.Node | None
    value: Any
    faults: tuple[Fault, ...] = ()

    def line_of(self, location: tuple[str | int, ...]) -> int | None:
        """Line of a key or item, or of the innermost thing around it that the file holds."""
        node, line = self.root, 1
        for part in location:
            found = _child(node, part)
            if found is None:
                break
            line, node = found
        return None if self.root is None else line


@dataclass
class _Build:
    faults: list[Fault] = field(default_factory=list)
    open_nodes: set[int] = field(default_factory=set)

    def fault(self, node: yaml.Node, path: str, message: str) -> None:
        self.faults.append(Fault(node.start_mark.line + 1, path, message))

    def value(self, node: yaml.Node, path: str) -> Any:
        """The plain value of a node, faults noted on the way."""
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, path)
        if id(node) in self.open_nodes:
            self.fault(node, path, "contains itself")
            return None
        self.open_nodes.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.value(item, f"{path}[{i}]") for i, item in enumerate(node.value)]
            assert isinstance(node, yaml.MappingNode)
            return self.mapping(node, path)
        finally:
            self.open_nodes.discard(id(node))

    def mapping(self, node: yaml.MappingNode, path: str) -> dict[str, Any]:
        result: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is None:
                self.fault(key_node, path, "a key must be a word")
                continue
            inner = f"{path}.{key}" if path else key
            if key in lines:
                self.fault(key_node, inner, f"given twice, first in line {lines[key]}")
                continue
            lines[key] = key_node.start_mark.line + 1
            result[key] = self.value(value_node, inner)
        return result

    def scalar(self, node: yaml.ScalarNode, path: str) -> Any:
        text = node.value
        match node.tag.removeprefix(_TAG):
            case "null":
                return None
            case "bool" if text.lower() in {"true", "false"}:
                return text.lower() == "true"
            case "int" if _INT.fullmatch(text):
                return int(text, 10 if text.lstrip("+-").isdigit() else 0)
            case "float" if _FLOAT.fullmatch(text):
                return float(text.replace(".inf", "inf").replace(".nan", "nan"))
            case "str":
                return text
        self.fault(node, path, f"the tag {node.tag!r} has no meaning in a recipe")
        return None


def _child(node: yaml.Node | None, part: str | int) -> tuple[int, yaml.Node] | None:
    """Line and node of one key or item."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == part:
                return key.start_mark.line + 1, value
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part].start_mark.line + 1, node.value[part]
    return None


def parse_tree(text: str, *, file: str) -> Tree:
    """Read one YAML document.

    Raises: RecipeError naming file and line when the text is no YAML; other faults are collected in the tree.
    """
    build = _Build()
    try:
        root = yaml.compose(text, Loader=_Loader)
        value = {} if root is None else build.value(root, "")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f"line {mark.line + 1}: "
        raise RecipeError(f"{file}: {line}not readable as YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"{file}: not readable as YAML: {error}") from error
    except RecursionError as error:
        raise RecipeError(f"{file}: nested too deeply to be a recipe") from error
    return Tree(root, value, tuple(build.faults))
