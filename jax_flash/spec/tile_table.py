"""Tuned tiles, one row per kernel family; every row says where its numbers come from."""

from jax_flash.spec.arch import Arch
from jax_flash.spec.tile import BackwardTile, ForwardTile

# Interleaved timings on one H200 (driver 580.159, bf16, T=8192), TFLOP/s full / causal; all in
# benchmarks/results/2026-11-29_nvidia-h200_variants.csv.
# D=64: 192 queries in three warpgroups 522 / 487; 128 queries in two 416 / 411.
# D=128: 128 keys a tile 624 / 587; 160 keys 607 / 573; 176 keys do not fit in 240 registers.
FORWARD_TILES: dict[tuple[Arch, int], ForwardTile] = {
    (Arch.SM90A, 64): ForwardTile(
        head_dim=64, tile_q=192, tile_kv=128, num_stages=2, num_consumer_warpgroups=3
    ),
    (Arch.SM90A, 128): ForwardTile(
        head_dim=128, tile_q=128, tile_kv=128, num_stages=2, num_consumer_warpgroups=2
    ),
}

# dK and dV (64 keys x D, twice) live in registers; S and dP are 64 keys x tile_q each.
# D=128: overlap_d_key 560 / 543, without 517 / 497; three stages instead of two 558 / 543.
# D=64: overlap_d_key needs more than 240 registers with 128 queries a tile.
BACKWARD_TILES: dict[tuple[Arch, int], BackwardTile] = {
    (Arch.SM90A, 64): BackwardTile(
        head_dim=64,
        tile_q=128,
        tile_kv=128,
        num_stages=2,
        num_consumer_warpgroups=2,
        overlap_d_key=False,
    ),
    (Arch.SM90A, 128): BackwardTile(
        head_dim=128,
        tile_q=64,
        tile_kv=128,
        num_stages=2,
        num_consumer_warpgroups=2,
        overlap_d_key=True,
    ),
}
