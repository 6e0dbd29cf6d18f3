"""The order in which deterministic blocks add to dQ, as arithmetic that device code shares.

Each block of the backward kernel owns a key tile. Blocks start in the order of their places, and a
query tile's sum takes its key tiles in the order of their turns. A block may wait for the turns
before its own, so those must belong to blocks that have started: the turns of every query tile
follow the places. Then the block that started first of those that are not done never waits, and
all of them finish, however many the device holds at a time (``tests/spec/test_turns.py``).
"""


def key_tile_at(place: int, key_tiles: int, *, shortest_first: bool) -> int:
    """Returns the key tile of the block at a place of its head, ``0 <= place < key_tiles``.

    Under a causal mask the last key tile has the fewest queries. With ``shortest_first`` it starts
    first, and each block then meets its first query tile when it is its turn, with no wait.
    """
    return key_tiles - 1 - place if shortest_first else place


def turn_of(key_tile: int, begin: int, end: int, *, shortest_first: bool) -> int:
    """Returns how many key tiles add to a query tile before ``key_tile``.

    Args:
      key_tile: one of those that the query tile may see.
      begin: the first of them.
      end: past the last of them.
      shortest_first: as in ``key_tile_at``.
    """
    return end - 1 - key_tile if shortest_first else key_tile - begin
