"""Tile shapes of the kernels, and the shared memory they need."""

from dataclasses import dataclass

WARPGROUP_ROWS = 64
"""Rows of one warpgroup matmul; each consumer warpgroup owns this many rows of its tile."""

_ELEMENT_BYTES = 2  # bf16 and f16
_FLOAT_BYTES = 4

BARRIER_BYTES = 1024
"""Shared memory kept for barriers: a whole swizzle repeat, so that tiles after it are aligned."""


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_head_dims(*head_dims: int) -> None:
    for head_dim in head_dims:
        _check(
            head_dim % 64 == 0 and 0 < head_dim <= 256,
            f"head dimension {head_dim} is not a multiple of 64 up to 256",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardTile:
    """Tile of the sm_90a forward kernel: one block owns ``tile_q`` queries of one head.

    Each of ``num_consumer_warpgroups`` warpgroups owns an equal share of the query rows. The kernel
    serves all operands of at most these head dimensions: TMA fills what is missing with zeros, and
    does not store what is too much.
    """

    head_dim: int
    value_head_dim: int
    tile_q: int
    tile_kv: int
    num_stages: int
    num_consumer_warpgroups: int
    weight_buffers: int = 1
    """Register copies of a tile's weights. With 2 they are rounded while the tensor cores still
    read those of the tile before; that takes tile_kv / 4 more registers, and twice the code."""
    query_stages: int = 1
    """Buffers of Q. With 2 the next tile's queries are loaded while this one's are still read."""
    output_in_query: bool = False
    """Whether the output is staged where the queries were, for lack of room; the next tile's
    queries are then loaded after the store, not during the matmuls."""

    def __post_init__(self) -> None:
        """Checks what the warpgroup matmul instructions require."""
        _check_head_dims(self.head_dim, self.value_head_dim)
        _check(
            not self.output_in_query or self.value_head_dim <= self.head_dim,
            f"output_in_query: {self.value_head_dim} columns do not fit into {self.head_dim}",
        )
        _check(self.query_stages in (1, 2), f"query_stages={self.query_stages} is not 1 or 2")
        _check(
            not self.output_in_query or self.query_stages == 1,
            f"output_in_query: query_stages={self.query_stages}, and the output takes the only one",
        )
        _check(
            self.tile_q == WARPGROUP_ROWS * self.num_consumer_warpgroups,
            f"tile_q={self.tile_q} is not 64 rows for each of "
            f"{self.num_consumer_warpgroups} consumer warpgroups",
        )
        _check(
            self.tile_kv % 16 == 0 and 16 <= self.tile_kv <= 256,
            f"tile_kv={self.tile_kv} is not a multiple of 16 up to 256",
        )
        _check(self.num_stages >= 2, f"num_stages={self.num_stages}: overlap needs at least 2")
        _check(self.weight_buffers in (1, 2), f"weight_buffers={self.weight_buffers} is not 1 or 2")

    @property
    def threads(self) -> int:
        """Threads of one block: the consumers and one producer warpgroup."""
        return 128 * (self.num_consumer_warpgroups + 1)

    @property
    def shared_memory_bytes(self) -> int:
        """Shared memory of the Q and O tiles, the stages of K and V, and the barriers."""
        output_columns = 0 if self.output_in_query else self.value_head_dim
        queries = self.tile_q * (self.query_stages * self.head_dim + output_columns)
        keys = self.num_stages * self.tile_kv * (self.head_dim + self.value_head_dim)
        return (queries + keys) * _ELEMENT_BYTES + BARRIER_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardTile:
    """Tile of the sm_90a kernel of all gradients: one block owns ``tile_kv`` keys of one key head.

    It keeps its K and V in shared memory and dK, dV in registers, and visits the query tiles of
    every query head of its group.
    """

    head_dim: int
    """D = Dv, at most."""
    tile_q: int
    tile_kv: int
    num_stages: int
    """Stages of Q and of dO."""
    num_consumer_warpgroups: int
    overlap_d_key: bool
    """Whether a tile's dK matmul still runs while the next tile's scores are computed. Its operand
    takes tile_q / 4 more registers then; too many, and the compiler serialises all matmuls."""

    def __post_init__(self) -> None:
        """Checks what the warpgroup matmul instructions require."""
        _check_head_dims(self.head_dim)
        _check(
            self.tile_kv == WARPGROUP_ROWS * self.num_consumer_warpgroups,
            f"tile_kv={self.tile_kv} is not 64 rows for each of "
            f"{self.num_consumer_warpgroups} consumer warpgroups",
        )
        _check(self.tile_q % 64 == 0, f"tile_q={self.tile_q} is not a multiple of 64")
        _check(self.num_stages >= 1, f"num_stages={self.num_stages} is not positive")

    @property
    def value_head_dim(self) -> int:
        """Dv, at most."""
        return self.head_dim

    @property
    def threads(self) -> int:
        """Threads of one block: the consumers and one producer warpgroup."""
        return 128 * (self.num_consumer_warpgroups + 1)

    @property
    def shared_memory_bytes(self) -> int:
        """Shared memory of K, V, the stages of Q and dO with their row statistics, dS twice, a
        part of dQ, and the barriers."""
        keys = 2 * self.tile_kv * self.head_dim * _ELEMENT_BYTES
        queries = 2 * self.num_stages * self.tile_q * self.head_dim * _ELEMENT_BYTES
        statistics = 2 * self.num_stages * self.tile_q * _FLOAT_BYTES
        scores = 2 * self.tile_q * self.tile_kv * _ELEMENT_BYTES
        d_queries = self.tile_q * self.head_dim * _FLOAT_BYTES
        return keys + queries + statistics + scores + d_queries + BARRIER_BYTES

    @property
    def staged_dq_bytes(self) -> int:
        """Shared memory of FINISH_DQ: a query tile of dQ, rounded."""
        return self.tile_q * self.head_dim * _ELEMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardBiasTile:
    """Tile of the sm_90a kernel of the bias's gradient: one block owns a tile of the gradient.

    Each of ``num_consumer_warpgroups`` warpgroups owns 64 query rows of it. The block visits every
    batch element, head and, where the bias has one for all of them, query or key tile that the
    gradient is summed over.
    """

    head_dim: int
    value_head_dim: int
    tile_q: int
    tile_kv: int
    num_stages: int
    """Stages of Q with K, and of dO with V."""
    num_consumer_warpgroups: int

    def __post_init__(self) -> None:
        """Checks what the warpgroup matmul instructions require."""
        _check_head_dims(self.head_dim, self.value_head_dim)
        _check(
            self.tile_q == WARPGROUP_ROWS * self.num_consumer_warpgroups,
            f"tile_q={self.tile_q} is not 64 rows for each of "
            f"{self.num_consumer_warpgroups} consumer warpgroups",
        )
        _check(
            self.tile_kv % 16 == 0 and 16 <= self.tile_kv <= 128,
            f"tile_kv={self.tile_kv} is not a multiple of 16 up to 128",
        )
        _check(self.num_stages >= 1, f"num_stages={self.num_stages} is not positive")

    @property
    def threads(self) -> int:
        """Threads of one block: the consumers and one producer warpgroup."""
        return 128 * (self.num_consumer_warpgroups + 1)

    @property
    def sum_columns(self) -> int:
        """Floats between rows of the gradient's tile in shared memory: a row and a column are then
        both read without bank conflicts."""
        return self.tile_kv + 1

    @property
    def shared_memory_bytes(self) -> int:
        """Shared memory of the stages, the gradient's tile, and the barriers."""
        columns = self.head_dim + self.value_head_dim
        stages = self.num_stages * (self.tile_q + self.tile_kv) * columns * _ELEMENT_BYTES
        return stages + self.tile_q * self.sum_columns * _FLOAT_BYTES + BARRIER_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitBackwardTile:
    """Tiles of the sm_90a pair of kernels, one for dK and dV and one for dQ.

    For head dimensions at which dK and dV of 128 keys do not fit into registers. A block of
    BACKWARD_KV owns ``tile_kv`` keys of one key head and visits ``tile_q`` queries at a time; one
    warpgroup sums dV, the other dK. A block of BACKWARD_Q owns 64 queries for each warpgroup and
    visits ``tile_kv`` keys at a time.
    """

    head_dim: int
    value_head_dim: int
    tile_q: int
    tile_kv: int
    num_stages: int
    """Stages of Q and of dO in BACKWARD_KV."""
    num_weight_stages: int
    """Stages of P, which one warpgroup of BACKWARD_KV passes to the other."""
    num_key_stages: int
    """Stages of K in BACKWARD_Q."""
    num_value_stages: int
    """Stages of V in BACKWARD_Q."""

    def __post_init__(self) -> None:
        """Checks what the warpgroup matmul instructions require."""
        _check_head_dims(self.head_dim, self.value_head_dim)
        _check(
            self.tile_kv == WARPGROUP_ROWS,
            f"tile_kv={self.tile_kv} is not the 64 rows of a warpgroup",
        )
        _check(
            self.tile_q % 64 == 0 and self.owned_queries % self.tile_q == 0,
            f"tile_q={self.tile_q} is neither 64 nor {self.owned_queries}",
        )
        for name in ("num_stages", "num_weight_stages", "num_value_stages"):
            _check(getattr(self, name) >= 1, f"{name}={getattr(self, name)} is not positive")
        _check(
            self.num_key_stages >= 2,
            f"num_key_stages={self.num_key_stages}: the scores of the next keys are computed while "
            "dQ still reads the last, which needs at least 2",
        )

    @property
    def num_consumer_warpgroups(self) -> int:
        """Consumer warpgroups of either kernel."""
        return 2

    @property
    def owned_queries(self) -> int:
        """Queries of a BACKWARD_Q block."""
        return WARPGROUP_ROWS * self.num_consumer_warpgroups

    @property
    def threads(self) -> int:
        """Threads of a block of either kernel: the consumers and one producer warpgroup."""
        return 128 * (self.num_consumer_warpgroups + 1)

    @property
    def kv_shared_memory_bytes(self) -> int:
        """Shared memory of BACKWARD_KV: K, V, the stages of Q and dO with their row statistics,
        those of P, and the barriers."""
        columns = self.head_dim + self.value_head_dim
        rows = self.tile_kv + self.num_stages * self.tile_q
        statistics = 2 * self.num_stages * self.tile_q * _FLOAT_BYTES
        weights = self.num_weight_stages * self.tile_q * self.tile_kv * _FLOAT_BYTES
        return rows * columns * _ELEMENT_BYTES + statistics + weights + BARRIER_BYTES

    @property
    def q_shared_memory_bytes(self) -> int:
        """Shared memory of BACKWARD_Q: Q, dO, the stages of K and of V, and the barriers."""
        key_rows = self.owned_queries + self.num_key_stages * self.tile_kv
        value_rows = self.owned_queries + self.num_value_stages * self.tile_kv
        elements = key_rows * self.head_dim + value_rows * self.value_head_dim
        return elements * _ELEMENT_BYTES + BARRIER_BYTES


AnyBackwardTile = BackwardTile | SplitBackwardTile
"""Tile of the backward operation: of one kernel, or of a pair."""
