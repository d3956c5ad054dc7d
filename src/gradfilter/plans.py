"""A plan: what surgery will do to each layer of a model, as a value that can be printed before it is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .methods import Method

__all__ = [
    "DOES_NOT_RUN",
    "Action",
    "LayerCost",
    "LayerPlan",
    "NormPolicy",
    "Plan",
    "format_bytes",
    "format_count",
    "table",
]

Action = Literal["train", "pass", "frozen"]
NormPolicy = Literal["fixed", "affine", "batch"]
DOES_NOT_RUN = "does not run on the example"


@dataclass(frozen=True)
class LayerCost:
    """Bytes kept for the backward and multiply-adds of one layer, for one batch of the example's size."""

    kept: int = 0
    forward_macs: int = 0
    backward_macs: int = 0


@dataclass(frozen=True)
class LayerPlan:
    """One row: train it, pass gradients through it, or leave it frozen with nothing to do.

    ``reason`` says why a layer that was asked to use a method stays exact, or why nothing of it trains. Costs
    are there if the plan was made with an example input.
    """

    name: str
    kind: str
    action: Action
    method: Method
    reason: str = ""
    before: LayerCost | None = None
    after: LayerCost | None = None


@dataclass(frozen=True)
class Plan:
    """What ``apply_`` will do. Printing it gives the table; ``rows`` has one entry per layer in order.

    norms: the norms that train, as the policy ``norm`` says. other: costs of all modules that are not layers.

    >>> from gradfilter import Exact
    >>> print(Plan((LayerPlan("conv", "Conv2d", "train", Exact()),)))
    layer  kind    action  method
    conv   Conv2d  train   Exact()
    """

    rows: tuple[LayerPlan, ...]
    norm: NormPolicy = "fixed"
    norms: tuple[str, ...] = ()
    other: tuple[LayerCost, LayerCost] | None = None

    @property
    def trained(self) -> tuple[str, ...]:
        return tuple(row.name for row in self.rows if row.action == "train")

    @property
    def kept(self) -> tuple[int, int]:
        """Bytes kept by the whole model, before and after."""
        before, after = self.total
        return before.kept, after.kept

    @property
    def total(self) -> tuple[LayerCost, LayerCost]:
        """The costs of the whole model, before and after."""
        pairs = [(row.before, row.after) for row in self.rows]
        pairs += [self.other] if self.other else []
        before = [cost for cost, _ in pairs if cost]
        after = [cost for _, cost in pairs if cost]
        return _sum(before), _sum(after)

    def with_costs(
        self, costs: dict[str, tuple[LayerCost, LayerCost]], other: tuple[LayerCost, LayerCost]
    ) -> Plan:
        rows = (
            replace(row, before=costs[row.name][0], after=costs[row.name][1]) if row.name in costs else row
            for row in self.rows
        )
        return replace(self, rows=tuple(rows), other=other)

    def __str__(self) -> str:
        head = ["layer", "kind", "action", "method"]
        reasons = any(map(_remark, self.rows))
        head += ["kept", "-> kept", "backward", "-> backward"] if self.other else []
        lines = [head + ["reason"] * reasons]
        for row in self.rows:
            method = "" if row.action == "frozen" else str(row.method)
            lines.append([row.name, row.kind, row.action, method])
            most = row.action != "frozen" and row.method.bytes_depend_on_data
            lines[-1] += _cost_cells(row.before, row.after, most) if self.other else []
            lines[-1] += [_remark(row)] * reasons
        if self.other:
            before, after = self.total
            lines.append(["(other modules)", "", "", "", *_cost_cells(*self.other)])
            most = any(r.action != "frozen" and r.method.bytes_depend_on_data for r in self.rows)
            lines.append(["total", "", "", "", *_cost_cells(before, after, most)])
            shares = _share(before.kept, after.kept), _share(before.backward_macs, after.backward_macs)
            lines.append(["of exact", "", "", "", "", shares[0], "", shares[1]])
        return table(lines)


def _remark(row: LayerPlan) -> str:
    return row.reason or ("" if row.action == "frozen" else row.method.warns)


def _sum(costs: Sequence[LayerCost]) -> LayerCost:
    return LayerCost(
        sum(cost.kept for cost in costs),
        sum(cost.forward_macs for cost in costs),
        sum(cost.backward_macs for cost in costs),
    )


def _share(before: int, after: int) -> str:
    return f"{after / before:.3f}x" if before else ""


def _cost_cells(before: LayerCost | None, after: LayerCost | None, most: bool = False) -> list[str]:
    """most: what is kept depends on the data, and this is the most it can be."""
    if before is None or after is None:
        return ["", "", "", ""]
    kept = [format_bytes(before.kept), "at most " * most + format_bytes(after.kept)]
    return [*kept, format_count(before.backward_macs), format_count(after.backward_macs)]


def format_bytes(count: int) -> str:
    """Bytes as people read them.

    >>> format_bytes(0), format_bytes(2048), format_bytes(5 * 2**20)
    ('0', '2.0 KiB', '5.0 MiB')
    """
    size = float(count)
    for unit in ("", " KiB", " MiB"):
        if size < 1024:
            return f"{size:.1f}{unit}" if unit else str(count)
        size /= 1024
    return f"{size:.1f} GiB"


def format_count(count: int) -> str:
    """Operations as people read them.

    >>> format_count(1234567)
    '1.2 M'
    """
    size = float(count)
    for unit in ("", " k", " M"):
        if size < 1000:
            return f"{size:.1f}{unit}" if unit else str(count)
        size /= 1000
    return f"{size:.1f} G"


def table(lines: list[list[str]]) -> str:
    """Cells to aligned columns; numbers, except in the first column, to the right.

    >>> print(table([["name", "size"], ["a", "10"], ["b", "9"]]))
    name  size
    a       10
    b        9
    """
    columns = max(map(len, lines))
    rows = [line + [""] * (columns - len(line)) for line in lines]
    cells = []
    for i, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        numbers = i > 0 and all(cell[:1] in "-.0123456789" for cell in column[1:])
        cells.append([cell.rjust(width) if numbers else cell.ljust(width) for cell in column])
    return "\n".join("  ".join(row).rstrip() for row in zip(*cells, strict=True))
