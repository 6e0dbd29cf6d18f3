"""Turns of deterministic blocks: no order in which the hardware may start blocks can deadlock."""

from __future__ import annotations

import random
from collections.abc import Iterator

from jax_flash.spec.band_mask import Band, visible_key_tiles, visible_query_tiles
from jax_flash.spec.turns import turn_of

TILE_Q, TILE_KV = 64, 128


def bands() -> Iterator[tuple[Band, int, int]]:
    """Bands with operand lengths T and S: causal with offsets, windows, full, empty tiles."""
    yield Band(lower=None, upper=None), 700, 500
    yield Band(lower=None, upper=0), 64, 128
    yield Band(lower=None, upper=-110), 150, 40
    yield Band(lower=-40, upper=None), 150, 290
    yield Band(lower=-1023, upper=0), 9000, 9000
    numbers = random.Random(0)
    for _ in range(300):
        queries, keys = numbers.randint(1, 1500), numbers.randint(1, 1500)
        lower = numbers.choice([None, numbers.randint(-900, 300)])
        upper = numbers.choice([None, numbers.randint(-300, 900)])
        yield Band(lower=lower, upper=upper), queries, keys


def visitors(band: Band, queries: int, keys: int, query_tile: int) -> list[int]:
    """Key tiles whose blocks add to a query tile: those in whose own range it is."""
    key_tiles = -(-keys // TILE_KV)
    found = []
    for key_tile in range(key_tiles):
        begin, end = visible_query_tiles(
            band,
            first_key=key_tile * TILE_KV,
            last_key=(key_tile + 1) * TILE_KV - 1,
            query_length=queries,
            tile_q=TILE_Q,
        )
        if begin <= query_tile < end:
            found.append(key_tile)
    return found


def test_every_tile_waits_only_for_tiles_that_were_taken_before_it() -> None:
    """By induction over the tiles that have been taken, each of them then gets done.

    That those of a head are taken in the order of their key tiles is tested with the scheduler.
    """
    waits = 0
    for band, queries, keys in bands():
        for query_tile in range(-(-queries // TILE_Q)):
            begin, _end = visible_key_tiles(
                band,
                first_query=query_tile * TILE_Q,
                last_query=(query_tile + 1) * TILE_Q - 1,
                key_length=keys,
                tile_kv=TILE_KV,
            )
            found = visitors(band, queries, keys, query_tile)
            in_turn = sorted(found, key=lambda tile: turn_of(tile, begin))
            turns = [turn_of(tile, begin) for tile in in_turn]
            assert turns == list(range(len(found))), "a turn that nobody has would never end"
            assert in_turn == sorted(found), "a tile would wait for one that is taken later"
            waits += max(len(found) - 1, 0)
    assert waits > 1000
