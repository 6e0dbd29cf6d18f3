"""Which positions of a sequence each device holds.

With n devices, "contiguous" gives each of them one stretch of the sequence. Under a causal mask the
last device then has the most to do, and all wait for it. "zigzag" cuts the sequence into 2n chunks
and gives device r the chunks r and 2n - 1 - r, so that all have the same work (Llama 3,
arXiv:2407.21783, section 3.3.2):

    n = 4                 device 0   device 1   device 2   device 3
    contiguous             0 1        2 3        4 5        6 7
    zigzag                 0 7        1 6        2 5        3 4
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

ORDERS = ("contiguous", "zigzag")
"""Names that `order` takes."""

Index = int | jax.Array
Rank = TypeVar("Rank", int, jax.Array)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A sequence spread over devices.

    "Stored" order is that of the devices, "natural" order that of positions.

    Attributes:
        order: one of `ORDERS`.
        shards: devices that hold the sequence, n.
        local_length: positions of each device, a multiple of `chunks`.
    """

    order: str
    shards: int
    local_length: int

    @property
    def chunks(self) -> int:
        """Stretches of consecutive positions that a device holds."""
        return 2 if self.order == "zigzag" else 1

    @property
    def chunk_length(self) -> int:
        return self.local_length // self.chunks

    def starts(self, rank: Rank) -> tuple[Rank, ...]:
        """The position of the first token of each chunk of a device."""
        first = rank * self.chunk_length
        if self.chunks == 1:
            return (first,)
        return first, (2 * self.shards - 1 - rank) * self.chunk_length

    def split(self, array: jax.Array, axis: int) -> list[jax.Array]:
        """Cuts a device's part, which has `local_length` on `axis`, into its chunks."""
        return jnp.split(array, self.chunks, axis) if self.chunks > 1 else [array]

    def to_natural(self, array: jax.Array, axis: int) -> jax.Array:
        """Reorders a whole sequence on `axis` from stored to natural order."""
        if self.chunks == 1:
            return array
        axis %= array.ndim
        pairs = array.reshape(
            *array.shape[:axis], self.shards, 2, self.chunk_length, *array.shape[axis + 1 :]
        )
        first, second = (jax.lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in (0, 1))
        chunks = jnp.concatenate([first, jnp.flip(second, axis)], axis)
        return chunks.reshape(array.shape)

    def to_stored(self, array: jax.Array, axis: int) -> jax.Array:
        """Reorders a whole sequence on `axis` from natural to stored order."""
        if self.chunks == 1:
            return array
        axis %= array.ndim
        chunks = array.reshape(
            *array.shape[:axis], 2 * self.shards, self.chunk_length, *array.shape[axis + 1 :]
        )
        first, second = jnp.split(chunks, 2, axis)
        return jnp.stack([first, jnp.flip(second, axis)], axis + 1).reshape(array.shape)


def zigzag_order(length: int, shards: int) -> np.ndarray:
    """Returns the position of each token of a sequence in zigzag order.

    `tokens[zigzag_order(T, n)]` is the sequence in zigzag order, and the array itself is what
    rotary embeddings need as positions. `numpy.argsort` of it leads back.

    Args:
        length: of the sequence, T, a multiple of 2 * shards.
        shards: devices that the sequence will be sharded over, n.

    Returns:
        int32 [T].

    Raises:
        TypeError: an argument is not an integer.
        ValueError: the length is not a multiple of 2 * shards.
    """
    layout = _zigzag_layout(length, shards)
    chunk = np.arange(layout.chunk_length, dtype=np.int32)
    starts = [start for rank in range(shards) for start in layout.starts(rank)]
    return (np.asarray(starts, np.int32)[:, None] + chunk).reshape(-1)


def to_zigzag(array: jax.Array, shards: int, *, axis: int) -> jax.Array:
    """Puts a sequence into zigzag order, to be sharded over `shards` devices.

    Do it to tokens, labels and segment ids before they are sharded. Of an array that is sharded
    already, this moves half to other devices.

    Args:
        array: the whole sequence on `axis`, whose size is a multiple of 2 * shards.
        shards: devices.
        axis: the sequence axis.

    Raises:
        TypeError: `shards` is not an integer.
        ValueError: the size of the axis is not a multiple of 2 * shards.
    """
    array = jnp.asarray(array)
    return _zigzag_layout(array.shape[axis], shards).to_stored(array, axis)


def from_zigzag(array: jax.Array, shards: int, *, axis: int) -> jax.Array:
    """Puts a sequence in zigzag order back into natural order; the inverse of `to_zigzag`."""
    array = jnp.asarray(array)
    return _zigzag_layout(array.shape[axis], shards).to_natural(array, axis)


def local_positions(local_length: int, *, axis_name: str, order: str = "contiguous") -> jax.Array:
    """Returns the positions of the tokens that this device holds, inside `jax.shard_map`.

    Args:
        local_length: tokens of each device; even for "zigzag".
        axis_name: the mesh axis that the sequence is sharded over.
        order: one of `ORDERS`.

    Returns:
        int32 [local_length], for rotary or other position embeddings.

    Raises:
        ValueError: unknown order, or an odd number of tokens in zigzag order.
    """
    check_order(order)
    layout = Layout(order=order, shards=jax.lax.axis_size(axis_name), local_length=local_length)
    if local_length % layout.chunks:
        raise ValueError(
            f"local_length is {local_length}; in zigzag order a device holds two chunks of one "
            f"length, so it must be even. Pad the sequence to a multiple of {2 * layout.shards}."
        )
    chunk = jnp.arange(layout.chunk_length, dtype=jnp.int32)
    return jnp.concatenate(
        [start + chunk for start in layout.starts(jax.lax.axis_index(axis_name))]
    )


def check_order(order: str) -> None:
    """Raises ValueError unless `order` is one of `ORDERS`."""
    if order not in ORDERS:
        raise ValueError(
            f"order is {order!r}; it must be one of {', '.join(map(repr, ORDERS))}: how the "
            "sequence is spread over the devices. Use to_zigzag to put it in zigzag order."
        )


def _zigzag_layout(length: int, shards: int) -> Layout:
    for name, number in (("length", length), ("shards", shards)):
        if isinstance(number, bool) or not isinstance(number, int | np.integer):
            raise TypeError(
                f"{name} is {number!r} ({type(number).__name__}); it must be an integer. Pass the "
                "size of the array's or the mesh's axis."
            )
    if shards < 1 or length % (2 * shards):
        raise ValueError(
            f"length is {length} and shards is {shards}; the length must be a multiple of 2 * "
            f"shards = {2 * shards}, and shards at least 1: every device holds two chunks of one "
            "length. Pad the sequence, or shard it over fewer devices."
        )
    return Layout(order="zigzag", shards=int(shards), local_length=int(length) // int(shards))
