"""Which chains of a traced model are one inverted residual: expand, depthwise, project."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.fx import Node

from .native.inverted_residual import is_built
from .ops.fused import NONE, is_pointwise
from .ops.inverted_residual import is_depthwise, is_native

if TYPE_CHECKING:
    from .chains import Chain

__all__ = ["Block", "find_blocks"]


@dataclass(frozen=True)
class Block:
    """Chains that run as one, when the last of them would; ``expand`` is None where there is none."""

    expand: Chain | None
    depthwise: Chain
    project: Chain

    @property
    def chains(self) -> dict[str, Chain]:
        named = {"expand": self.expand, "depthwise": self.depthwise, "project": self.project}
        return {name: chain for name, chain in named.items() if chain is not None}


def find_blocks(chains: list[Chain], modules: dict[str, Any], frozen: set[Node]) -> list[Block]:
    """The blocks, all frozen or all trained, whose inner values nobody else reads."""
    if not is_built():
        return []
    ends = {chain.nodes[-1]: chain for chain in chains}

    def before(chain: Chain, is_kind: Callable[[nn.Conv2d], bool]) -> Chain | None:
        """The chain that makes this one's input, for it alone, if it can be part of a block."""
        value: Any = chain.conv.args[0]
        made = ends.get(value)
        if made is None or len(value.users) != 1 or made.add is not None or not is_native(made.kind):
            return None
        alike = (made.conv in frozen) == (chain.conv in frozen)
        return made if alike and is_kind(modules[str(made.conv.target)]) else None

    found: dict[Node, Block] = {}  # by what they end with
    for end, project in ends.items():
        if project.kind is NONE and is_pointwise(modules[str(project.conv.target)]):
            depthwise = before(project, is_depthwise)
            if depthwise is not None:
                expand = before(depthwise, is_pointwise)
                if depthwise.conv.args[0] in found:  # it is the end of the block before
                    expand = None
                found[end] = Block(expand, depthwise, project)
    return list(found.values())
