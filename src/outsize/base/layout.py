"""How a checkpoint file names and fuses what a shape table lists: rules as data.

A rule says where the rows of one of our tensors lie in their file: the whole tensor, one or more of n equal row slabs of a
fused one (qkv), or two halves in swapped order. Reading, and writing adapters for other clients, use the same rules.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True)
class Rule:
    """`ours` lies in `theirs`; braces hold indices, as in "transformer_blocks.{i}.attn.to_q.weight".

    part: (k, n) when ours begins at the k-th of n equal row slabs of theirs; span: how many of them it takes.
    is_swapped: theirs holds our two row halves in the other order. ones: how many dimensions of size 1 theirs has after
    ours (a linear that they write as a 1x1 convolution has two).
    """

    ours: str
    theirs: str
    part: tuple[int, int] = (0, 1)
    is_swapped: bool = False
    span: int = 1
    ones: int = 0


@dataclass(frozen=True, slots=True)
class Slab:
    """Rows [start, stop) of one tensor of a file, as fractions num/den of its rows."""

    tensor: str
    start: tuple[int, int]
    stop: tuple[int, int]

    def rows(self, num_rows: int) -> tuple[int, int]:
        """The row window in a tensor of num_rows rows (dimension 0)."""
        return num_rows * self.start[0] // self.start[1], num_rows * self.stop[0] // self.stop[1]


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>\\d+)", re.escape(template)))


@dataclass(frozen=True)
class Layout:
    """The naming of one kind of file for one family.

    prefixes: what may stand before every key, tried in order ("" and "model.diffusion_model." say). No rules: the file
    uses our names. lora_names: what an adapter for files of this kind calls its factors A and B, so that every client
    finds them (some clients read only one of the two spellings under these names). lora_module: what kohya's tools, which
    train on files of this kind, call their own module for adapters; "" where they train none.
    """

    name: str
    rules: tuple[Rule, ...] = ()
    prefixes: tuple[str, ...] = ("",)
    lora_names: tuple[str, str] = ("lora_A", "lora_B")
    lora_module: str = ""

    @cached_property
    def _compiled(self) -> tuple[tuple[re.Pattern[str], Rule], ...]:
        return tuple((_pattern(rule.ours), rule) for rule in self.rules)

    def rule_of(self, ours: str) -> tuple[Rule, str]:
        """The rule for one of our tensor names, and the name in their file (without prefix).

        Raises: KeyError when no rule covers the name.
        """
        if not self.rules:
            return Rule(ours, ours), ours
        for pattern, rule in self._compiled:
            match = pattern.fullmatch(ours)
            if match is not None:
                return rule, rule.theirs.format(**match.groupdict())
        raise KeyError(ours)

    @cached_property
    def _compiled_theirs(self) -> tuple[tuple[re.Pattern[str], Rule], ...]:
        return tuple((_pattern(rule.theirs), rule) for rule in self.rules)

    def ours_of(self, theirs: str) -> tuple[str, ...]:
        """Our tensors whose rows lie in one tensor of a file (without prefix), in the order of the rules; () if none."""
        if not self.rules:
            return (theirs,)
        found = ((pattern.fullmatch(theirs), rule) for pattern, rule in self._compiled_theirs)
        return tuple(
            rule.ours.format(**match.groupdict()) for match, rule in found if match is not None
        )

    def slabs(self, ours: str) -> tuple[Slab, ...]:
        """Where the rows of one of our tensors lie, in our order (without prefix)."""
        rule, theirs = self.rule_of(ours)
        k, n = rule.part
        if not rule.is_swapped:
            return (Slab(theirs, (k, n), (k + rule.span, n)),)
        assert rule.part == (0, 1), "a swapped tensor is never also a slab"
        return Slab(theirs, (1, 2), (1, 1)), Slab(theirs, (0, 1), (1, 2))
