"""Tuned tiles, one row per kernel family; every row says where its numbers come from."""

from jax_flash.spec.arch import Arch
from jax_flash.spec.tile import BackwardTile, ForwardTile

# D=64: 128 keys a tile keep S (64 registers) and O (32) far below the register budget.
# D=128: S and O take 64 registers each, so two warpgroups of 240 registers fit without spills.
# Not tuned yet: first correct shapes, chosen from the shared-memory and register budgets.
FORWARD_TILES: dict[tuple[Arch, int], ForwardTile] = {
    (Arch.SM90A, 64): ForwardTile(
        head_dim=64, tile_q=128, tile_kv=128, num_stages=2, num_consumer_warpgroups=2
    ),
    (Arch.SM90A, 128): ForwardTile(
        head_dim=128, tile_q=128, tile_kv=128, num_stages=2, num_consumer_warpgroups=2
    ),
}

# dK and dV (64 keys x D, twice) live in registers; S and dP are 64 keys x tile_q each.
BACKWARD_TILES: dict[tuple[Arch, int], BackwardTile] = {
    (Arch.SM90A, 64): BackwardTile(
        head_dim=64, tile_q=128, tile_kv=128, num_stages=2, num_consumer_warpgroups=2
    ),
    (Arch.SM90A, 128): BackwardTile(
        head_dim=128, tile_q=64, tile_kv=128, num_stages=2, num_consumer_warpgroups=2
    ),
}
