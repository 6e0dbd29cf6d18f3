"""The order of work of blocks, whose source is run here as the Python that it is too."""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace

import pytest

from jax_flash.kernels.shared import tile_scheduler
from jax_flash.spec.launch_plan import Dealing


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The functions of the module on Python integers; ``block`` and ``blocks`` are set by tests."""
    grid = SimpleNamespace(block=0, blocks=1)
    arch = SimpleNamespace(
        block_idx=lambda: (grid.block, 0, 0), grid_dim=lambda: (grid.blocks, 1, 1)
    )
    monkeypatch.setattr(tile_scheduler, "cute", SimpleNamespace(arch=arch))
    monkeypatch.setattr(
        tile_scheduler,
        "cutlass",
        SimpleNamespace(min=min, max=max, const_expr=lambda condition: condition),
    )
    monkeypatch.setattr(tile_scheduler, "Int32", int)
    monkeypatch.setattr(tile_scheduler, "divide", lambda dividend, divisor: dividend // divisor)
    ours = "make_schedule work_at _share _place_in_round _last_of_section _tile_of_share"
    for name in ours.split():
        monkeypatch.setattr(tile_scheduler, name, getattr(tile_scheduler, name).__wrapped__)
    return grid


def shares(
    grid: SimpleNamespace,
    tiles: int,
    heads: int,
    batch: int,
    blocks: int,
    *,
    differ_in_length: bool,
    section: int = 8,
    dealing: Dealing = Dealing.DEALT,
) -> list[list[tuple[int, int, int]]]:
    """Returns the tiles of each block, in order; handed out, those of all blocks from each."""
    grid.blocks = blocks
    result = []
    for grid.block in range(blocks):
        schedule = tile_scheduler.make_schedule(
            tiles, heads, batch, differ_in_length, section, dealing
        )
        result.append(
            [tuple(tile_scheduler.work_at(schedule, place)) for place in range(schedule.places)]
        )
    return result


@pytest.mark.parametrize("differ_in_length", [False, True])
def test_each_tile_is_worked_on_once(grid: SimpleNamespace, differ_in_length: bool) -> None:
    for tiles in range(1, 7):
        for heads, batch in ((1, 1), (3, 1), (2, 2), (5, 3)):
            expected = sorted(
                (tile, head, element)
                for tile in range(tiles)
                for head in range(heads)
                for element in range(batch)
            )
            for blocks in range(1, tiles * heads * batch + 1):
                given = shares(grid, tiles, heads, batch, blocks, differ_in_length=differ_in_length)
                assert sorted(chain.from_iterable(given)) == expected, (tiles, heads, batch, blocks)


@pytest.mark.parametrize("dealing", [Dealing.ONE_EACH, Dealing.HANDED_OUT])
@pytest.mark.parametrize("section", [1, 2, 5, 100])
def test_tiles_of_a_head_are_taken_in_order(
    grid: SimpleNamespace, section: int, dealing: Dealing
) -> None:
    """Where they wait for each other, for the tiles after their own."""
    for tiles, heads, batch in ((1, 3, 1), (4, 3, 2), (7, 5, 1)):
        blocks = tiles * heads * batch if dealing is Dealing.ONE_EACH else 3
        given = shares(
            grid,
            tiles,
            heads,
            batch,
            blocks,
            differ_in_length=True,
            section=section,
            dealing=dealing,
        )
        if dealing is Dealing.ONE_EACH:
            assert all(len(share) == 1 for share in given)
            in_order = [share[0] for share in given]
        else:
            # Whichever block takes a rank, it is the same tile.
            assert all(share == given[0] for share in given)
            in_order = given[0]
        taken: dict[tuple[int, int], list[int]] = {}
        for tile, head, element in in_order:
            taken.setdefault((element, head), []).append(tile)
        assert len(taken) == heads * batch
        assert all(order == list(reversed(range(tiles))) for order in taken.values())
        in_section = min(section, heads * batch)
        side_by_side = {(element, head) for _, head, element in in_order[:in_section]}
        assert len(side_by_side) == in_section


@pytest.mark.parametrize("tiles", [4, 8, 11, 16, 22, 32, 43, 64, 86, 128])
def test_blocks_end_together(grid: SimpleNamespace, tiles: int) -> None:
    """Lengths counted in tiles of the other side; 132 blocks as on an H200, 2048 tiles or more."""
    given = shares(grid, tiles, -(-2048 // tiles), 1, 132, differ_in_length=True)
    lengths = [sum(tile + 1 for tile, _, _ in share) for share in given]
    largest = max(lengths) / (sum(lengths) / len(lengths))
    # Blocks of five tiles of few lengths cannot share them out better.
    assert largest < (1.035 if tiles <= 8 else 1.015)
