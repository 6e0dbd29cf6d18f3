"""Attention over a sequence that is sharded over devices.

>>> from jax_flash import context_parallel
>>> output = context_parallel.attention(  # doctest: +SKIP
...     query, key, value, axis_name="context", mode="ring", is_causal=True
... )

See `attention` for the modes, and `to_zigzag` for the order that balances causal work.
"""

from jax_flash.context_parallel.attention import MODES, attention
from jax_flash.context_parallel.order import (
    ORDERS,
    from_zigzag,
    local_positions,
    to_zigzag,
    zigzag_order,
)

__all__ = [
    "MODES",
    "ORDERS",
    "attention",
    "from_zigzag",
    "local_positions",
    "to_zigzag",
    "zigzag_order",
]
