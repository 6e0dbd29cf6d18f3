"""The order in which deterministic blocks add to dQ, as arithmetic that device code shares.

Each block of the backward kernel owns a key tile, and a query tile's sum takes the key tiles that
it may see from the first to the last: each has the turn that is its place among them. A block may
wait for the turns before its own, so those must belong to blocks that have started: blocks of a
head start in the order of their key tiles. Then the block that started first of those that are not
done never waits, and all of them finish, however many the device holds at a time
(``tests/spec/test_turns.py``).

Under a causal mask the first key tile has the most queries: the longest blocks start first, and the
shortest end together. All of them visit the last queries first, and in one order, so that each
follows the block before it.
"""


def turn_of(key_tile: int, begin: int) -> int:
    """Returns how many key tiles add to a query tile before ``key_tile``.

    Args:
      key_tile: one of those that the query tile may see.
      begin: the first of them.
    """
    return key_tile - begin
