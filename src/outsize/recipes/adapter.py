"""The part of a recipe that says what is trained: which linears get low-rank matrices, of which rank."""

from __future__ import annotations

import fnmatch
import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from outsize.base.errors import RecipeError
from outsize.base.table import Role, ShapeTable, TensorSpec
from outsize.recipes.section import Added, AsTuple, Count, FilePath, Section, Text


class RankRule(Section):
    """Another rank for some of the linears that get an adapter."""

    roles: Annotated[tuple[Role, ...], AsTuple] = Field(
        default=(), description="Kinds of linears it is for; none: of any kind."
    )
    match: Text | None = Field(
        default=None,
        description="Pattern that the module's whole path must match, as in 'single_transformer_blocks.*.attn.to_out'; "
        "* stands for anything; null: any path.",
    )
    rank: int = Field(ge=0, description="Rank of their matrices; 0: they get no adapter.")
    alpha: float | None = Field(
        default=None,
        gt=0,
        description="Their alpha; null: as large beside their rank as the adapter's is beside its own.",
    )

    @model_validator(mode="after")
    def _is_for_something(self) -> Self:
        if not self.roles and self.match is None:
            raise ValueError("names neither roles nor match; to mean all linears set adapter.rank")
        return self

    def is_for(self, spec: TensorSpec) -> bool:
        """Whether a linear is one of those."""
        if self.roles and spec.role not in self.roles:
            return False
        return self.match is None or fnmatch.fnmatchcase(spec.module, self.match)


class AdapterChoice(Section):
    """What is trained: a low-rank adapter."""

    kind: Annotated[Literal["lora", "dora"], Added()] = Field(
        default="lora",
        description="lora: W + BA; dora: its rows brought back to a length that is learned by itself (PEFT and diffusers "
        "read it, others do not).",
    )
    rank: Count = Field(default=16, description="Rank of the adapter's matrices.")
    alpha: float | None = Field(
        default=None,
        gt=0,
        description="The adapter's effect is scaled by alpha / rank; null: alpha = rank.",
    )
    scaling: Annotated[Literal["rank", "sqrt_rank"], Added()] = Field(
        default="rank",
        description="What alpha is divided by: rank, or its square root (rsLoRA), which keeps high ranks learning.",
    )
    roles: Annotated[tuple[Role, ...], AsTuple] = Field(
        default=("attention", "mlp"),
        min_length=1,
        description="Kinds of linears inside the blocks that get an adapter.",
    )
    ranks: Annotated[tuple[RankRule, ...], AsTuple, Added()] = Field(
        default=(),
        description="Other ranks for some of them; the first rule that fits a linear is taken.",
    )

    start: Annotated[FilePath | None, Added()] = Field(
        default=None,
        description="Adapter to begin from, of this or another program: a .safetensors file or a PEFT folder, for exactly the "
        "linears that are trained and of no higher rank; null: from nothing.",
    )

    @property
    def effective_alpha(self) -> float:
        """Alpha with its default filled in."""
        return float(self.rank) if self.alpha is None else self.alpha

    def rank_of(self, spec: TensorSpec) -> tuple[int, float]:
        """Rank and alpha of a linear that has one of the roles; rank 0: it gets no adapter."""
        rule = next((one for one in self.ranks if one.is_for(spec)), None)
        if rule is None:
            return self.rank, self.effective_alpha
        share = self.effective_alpha / self.rank
        return rule.rank, rule.rank * share if rule.alpha is None else rule.alpha

    def scale_of(self, rank: int, alpha: float) -> float:
        """What BA is multiplied with."""
        return alpha / (math.sqrt(rank) if self.scaling == "sqrt_rank" else rank)

    def adapted(self, table: ShapeTable) -> dict[str, tuple[int, float]]:
        """Rank and alpha by module path, in the table's order.

        Raises: RecipeError when nothing would be trained, or a rule fits no linear that has one of the roles.
        """
        specs = list(table.linears(self.roles))
        idle = [
            f"adapter.ranks[{number}]"
            for number, rule in enumerate(self.ranks)
            if not any(rule.is_for(spec) for spec in specs)
        ]
        if idle:
            some = ", ".join(spec.module for spec in specs[:3]) or "none"
            raise RecipeError(
                f"{' and '.join(idle)} fits none of the {len(specs)} linears of the roles {', '.join(self.roles)} "
                f"(as in {some})"
            )
        found = {spec.module: self.rank_of(spec) for spec in specs}
        kept = {module: one for module, one in found.items() if one[0]}
        if not kept:
            have = ", ".join(sorted({spec.role for spec in table.linears()}))
            raise RecipeError(
                f"adapter.roles {list(self.roles)} match no linear inside the blocks that adapter.ranks leaves a rank, so "
                f"nothing would be trained; there are {have}"
            )
        return kept
