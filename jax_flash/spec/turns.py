"""The order in which deterministic blocks add to dQ, as arithmetic that device code shares.

A block of the backward kernel owns a key tile at a time, and a query tile's sum takes the key tiles
that it may see from the first to the last: each has the turn that is its place among them. A tile
may wait for the turns before its own, so those must belong to tiles that a running block has taken:
blocks take the key tiles of a head in order, and work on each before they wait for the next. Then
of the tiles that are not done the one taken first never waits, and all of them get done, however
many blocks the device holds at a time (``tests/spec/test_turns.py``).

Under a causal mask the first key tile has the most queries: the longest tiles are taken first, and
the shortest end together. All of them visit the last queries first, and in one order, so that each
follows the tile before it.
"""


def turn_of(key_tile: int, begin: int) -> int:
    """Returns how many key tiles add to a query tile before ``key_tile``.

    Args:
      key_tile: one of those that the query tile may see.
      begin: the first of them.
    """
    return key_tile - begin
