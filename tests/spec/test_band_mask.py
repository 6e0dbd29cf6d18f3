"""The tile ranges of a band against its definition, position by position."""

from itertools import product

import pytest

from jax_flash.spec.band_mask import (
    UNBOUNDED,
    Band,
    BandMask,
    band_of,
    kernel_band,
    visible_key_tiles,
    visible_query_tiles,
)

BOUNDS = (None, -9, -3, 0, 2, 11)
BANDS = [Band(lower=lower, upper=upper) for lower, upper in product(BOUNDS, BOUNDS)]
TILE = 4


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_visible_key_tiles_hold_every_key_that_a_query_of_the_tile_sees(band: Band):
    for query_length, key_length, first in product((1, 5, 13), (1, 4, 7, 18), (0, 4, 12)):
        last = min(first + TILE, query_length) - 1
        if last < first:
            continue
        begin, end = visible_key_tiles(
            band, first_query=first, last_query=last, key_length=key_length, tile_kv=TILE
        )
        seen = [
            key
            for key in range(key_length)
            if any(band.sees(query, key) for query in range(first, last + 1))
        ]
        if seen:
            # The smallest range: its ends are the tiles of the first and the last key.
            assert (begin, end) == (seen[0] // TILE, seen[-1] // TILE + 1)
        else:
            assert not any(
                band.sees(query, key)
                for query in range(first, last + 1)
                for key in range(begin * TILE, min(end * TILE, key_length))
            )


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_visible_query_tiles_hold_every_query_that_sees_a_key_of_the_tile(band: Band):
    for query_length, key_length, first in product((1, 4, 7, 18), (1, 5, 13), (0, 4, 12)):
        last = min(first + TILE, key_length) - 1
        if last < first:
            continue
        begin, end = visible_query_tiles(
            band, first_key=first, last_key=last, query_length=query_length, tile_q=TILE
        )
        seeing = [
            query
            for query in range(query_length)
            if any(band.sees(query, key) for key in range(first, last + 1))
        ]
        if seeing:
            assert (begin, end) == (seeing[0] // TILE, seeing[-1] // TILE + 1)
        else:
            assert not any(
                band.sees(query, key)
                for key in range(first, last + 1)
                for query in range(begin * TILE, min(end * TILE, query_length))
            )


def test_both_ranges_name_the_same_pairs_of_tiles():
    for band, query_length, key_length in product(BANDS, (3, 9, 17), (2, 11, 16)):
        query_tiles, key_tiles = -(-query_length // TILE), -(-key_length // TILE)
        by_query = set()
        for i in range(query_tiles):
            last = min((i + 1) * TILE, query_length) - 1
            begin, end = visible_key_tiles(
                band, first_query=i * TILE, last_query=last, key_length=key_length, tile_kv=TILE
            )
            by_query |= {(i, j) for j in range(begin, end)}
        by_key = set()
        for j in range(key_tiles):
            last = min((j + 1) * TILE, key_length) - 1
            begin, end = visible_query_tiles(
                band, first_key=j * TILE, last_key=last, query_length=query_length, tile_q=TILE
            )
            by_key |= {(i, j) for i in range(begin, end)}
        visible = {
            (query // TILE, key // TILE)
            for query, key in product(range(query_length), range(key_length))
            if band.sees(query, key)
        }
        assert visible <= by_query
        assert visible <= by_key


@pytest.mark.parametrize(
    ("is_causal", "window", "offset", "band"),
    [
        (False, (None, None), 5, Band()),
        (True, (None, None), 0, Band(upper=0)),
        (True, (None, None), 7, Band(upper=7)),
        (True, (None, None), -7, Band(upper=-7)),
        (False, (3, None), 7, Band(lower=4)),
        (False, (3, 2), 7, Band(lower=4, upper=9)),
        (True, (3, 2), 7, Band(lower=4, upper=7)),  # causal is the narrower right side
        (True, (0, 0), 0, Band(lower=0, upper=0)),
    ],
)
def test_band_of_the_public_arguments(is_causal, window, offset, band):
    assert band_of(is_causal=is_causal, window=window, query_offset=offset) == band


def test_every_mask_has_its_own_name():
    masks = [
        BandMask(lower=lower, upper=upper) for lower, upper in product((False, True), repeat=2)
    ]
    assert [mask.name for mask in masks] == ["full", "causal", "lower", "band"]
    assert Band(lower=-1).mask == BandMask(lower=True)
    assert Band().mask == BandMask()


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_the_two_ranges_are_each_others_transpose(band: Band):
    """What deterministic backward counts on: no query tile waits for a visitor that never comes."""
    tile_q, tile_kv = 4, 6
    for query_length, key_length in product((1, 5, 8, 23), (1, 6, 13, 24)):
        query_tiles, key_tiles = -(-query_length // tile_q), -(-key_length // tile_kv)
        for query_tile, key_tile in product(range(query_tiles), range(key_tiles)):
            begin, end = visible_key_tiles(
                band,
                first_query=query_tile * tile_q,
                last_query=(query_tile + 1) * tile_q - 1,
                key_length=key_length,
                tile_kv=tile_kv,
            )
            visited_by_query = begin <= key_tile < end
            begin, end = visible_query_tiles(
                band,
                first_key=key_tile * tile_kv,
                last_key=(key_tile + 1) * tile_kv - 1,
                query_length=query_length,
                tile_q=tile_q,
            )
            assert visited_by_query == (begin <= query_tile < end), (query_tile, key_tile)


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_the_kernels_band_sees_the_same_keys(band: Band):
    taken = kernel_band(band)
    assert taken.mask in (BandMask(), BandMask(upper=True), BandMask(lower=True, upper=True))
    far = UNBOUNDED // 2
    for query, key in product((0, 3, far), (0, 2, 5, far)):
        assert taken.sees(query, key) == band.sees(query, key)
