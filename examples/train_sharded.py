"""Trains a small GPT under data x tensor x context parallelism, on whatever devices there are.

    python examples/train_sharded.py --simulate 8      # 8 simulated devices on a CPU
    python examples/train_sharded.py                   # all GPUs of this machine

The mesh has three axes. "data" shards the batch, "tensor" the heads and the inner width of the
networks (Megatron-LM, arXiv:1909.08053), "context" the sequence: each device holds a part of every
sequence, and attention is `jax_flash.context_parallel.attention`. Parameters and activations are
placed once; XLA inserts the rest of the communication. `--compare` trains on one device, too, and
checks that the losses are the same.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm
from train_gpt import VOCABULARY, read_text, unigram_entropy

import jax_flash
from jax_flash import context_parallel

TOLERANCE = {"float32": 2e-4, "bfloat16": 0.25}
"""How far losses, in nats a byte, may be from one device's: sums are rounded in another order.

In bfloat16 the first steps, in which the loss falls by several nats, amplify roundings: on two
H200s losses were up to 0.16 apart within 20 steps, and 0.002 at the last.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the model and of its training.

    Attributes:
        context: bytes that the model sees at once, T.
        layers: transformer blocks.
        query_heads: N.
        key_heads: K.
        head_dim: D; the model is N * D wide.
        batch: sequences of a step.
        steps: of the optimizer.
    """

    context: int
    layers: int
    query_heads: int
    key_heads: int
    head_dim: int
    batch: int
    steps: int

    @property
    def width(self) -> int:
        """Size of a token's vector."""
        return self.query_heads * self.head_dim


PRESETS = {
    "small": Sizes(
        context=256, layers=2, query_heads=4, key_heads=2, head_dim=16, batch=4, steps=30
    ),
    "h200": Sizes(
        context=32768, layers=4, query_heads=8, key_heads=2, head_dim=128, batch=2, steps=60
    ),
}

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

# [batch, T, width] between blocks, and with the inner width, or heads, sharded inside of them.
ROWS = PartitionSpec("data", "context", None)
INNER = PartitionSpec("data", "context", "tensor")
TOKENS = PartitionSpec("data", "context")


def rotate(heads: jax.Array, positions: jax.Array) -> jax.Array:
    """Applies rotary position embeddings (arXiv:2104.09864) to [batch, T, N, D] at [T] positions.

    In zigzag order, neighbours in the array need not be neighbours in the text: positions tell.
    """
    half = heads.shape[-1] // 2
    frequencies = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[:, None, None] * frequencies
    left, right = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    turned = (left * cosine - right * sine, right * cosine + left * sine)
    return jnp.concatenate(turned, axis=-1).astype(heads.dtype)


class Block(nnx.Module):
    """Attention and a two-layer network, each on normalised input and added to it."""

    def __init__(self, sizes: Sizes, attention: Attention, dtype: Any, rngs: nnx.Rngs):
        width, self.head_dim = sizes.width, sizes.head_dim
        key_width = sizes.key_heads * sizes.head_dim

        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=False, dtype=dtype, rngs=rngs)

        self.attention = attention
        self.attention_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.to_query = linear(width, width)
        self.to_key = linear(width, key_width)
        self.to_value = linear(width, key_width)
        self.from_heads = linear(width, width)
        self.network_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.up = linear(width, 4 * width)
        self.down = linear(4 * width, width)

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """[batch, T, width] to the same, for tokens at [T] positions."""
        normed = self.attention_norm(x)
        query, key, value = (
            place(projected, INNER).reshape(*projected.shape[:2], -1, self.head_dim)
            for projected in (self.to_query(normed), self.to_key(normed), self.to_value(normed))
        )
        attended = self.attention(rotate(query, positions), rotate(key, positions), value)
        x = place(x + self.from_heads(attended.reshape(x.shape)), ROWS)
        inner = place(nnx.gelu(self.up(self.network_norm(x))), INNER)
        return place(x + self.down(inner), ROWS)


class Gpt(nnx.Module):
    """A decoder of bytes."""

    def __init__(self, sizes: Sizes, attention: Attention, dtype: Any, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(VOCABULARY, sizes.width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(sizes, attention, dtype, rngs) for _ in range(sizes.layers)])
        self.norm = nnx.RMSNorm(sizes.width, dtype=dtype, rngs=rngs)
        self.to_logits = nnx.Linear(sizes.width, VOCABULARY, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """[batch, T] at [T] positions to float32 logits of the next byte, [batch, T, 256]."""
        x = place(self.embedding(tokens), ROWS)
        for block in self.blocks:
            x = block(x, positions)
        return self.to_logits(self.norm(x)).astype(jnp.float32)


def place(array: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Tells XLA how an activation is sharded over the mesh that is set."""
    return jax.lax.with_sharding_constraint(array, spec)


def parameter_spec(path: tuple[Any, ...], parameter: jax.Array) -> PartitionSpec:
    """How a parameter is sharded: projections into heads and inner width by their columns, those
    out of them by their rows, all else on every device."""
    names = {str(getattr(part, "key", part)) for part in path}
    if parameter.ndim == 2 and names & {"to_query", "to_key", "to_value", "up"}:
        return PartitionSpec(None, "tensor")
    if parameter.ndim == 2 and names & {"from_heads", "down"}:
        return PartitionSpec("tensor", None)
    return PartitionSpec()


def make_mesh(sizes: Sizes, shape: tuple[int, int, int] | None, devices: list[Any]) -> Mesh:
    """Returns the mesh data x tensor x context.

    Without a shape, the number of devices is split: a factor of 2 for each of context, tensor and
    data in turn, as long as the model divides.
    """
    limits = {"context": sizes.context // 2, "tensor": sizes.key_heads, "data": sizes.batch}
    split: dict[str, int] = dict.fromkeys(limits, 1)
    if shape is None:
        rest = len(devices)
        while rest > 1:
            before = rest
            for name, limit in limits.items():
                if rest % 2 == 0 and limit % (2 * split[name]) == 0:
                    split[name], rest = 2 * split[name], rest // 2
            if rest == before:
                raise SystemExit(
                    f"{len(devices)} devices cannot be split into data x tensor x context for this "
                    "model by factors of 2; name the mesh, for example --mesh 1,1,3."
                )
    else:
        split = dict(zip(("data", "tensor", "context"), shape, strict=True))
    names: tuple[str, ...] = ("data", "tensor", "context")
    count = math.prod(split.values())
    if count > len(devices):
        raise SystemExit(f"--mesh needs {count} devices, and JAX has {len(devices)}.")
    for name, limit in limits.items():
        if limit % split[name]:
            raise SystemExit(
                f"--mesh: axis {name!r} has size {split[name]}, which must divide {limit} for this "
                "preset (half the sequence, the key heads, the batch)."
            )
    return jax.make_mesh(
        tuple(split[name] for name in names),
        names,
        axis_types=(AxisType.Auto,) * 3,
        devices=devices[:count],
    )


def batches(text: np.ndarray, sizes: Sizes, seed: int) -> np.ndarray:
    """Draws [steps, batch, T + 1] bytes from random places of the text."""
    random = np.random.default_rng(seed)
    starts = random.integers(0, len(text) - sizes.context, (sizes.steps, sizes.batch, 1))
    return text[starts + np.arange(sizes.context + 1)].astype(np.int32)


def train(sizes: Sizes, mesh: Mesh, text: np.ndarray, options: argparse.Namespace) -> list[float]:
    """Trains on the devices of a mesh.

    Returns:
        The loss of every step, nats a byte.
    """
    dtype = jnp.dtype(options.dtype)
    positions = context_parallel.zigzag_order(sizes.context, mesh.shape["context"])

    def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        if mesh.size == 1:
            return jax_flash.attention(query, key, value, is_causal=True)
        return context_parallel.attention(
            query,
            key,
            value,
            axis_name="context",
            mode=options.mode,
            order="zigzag",
            batch_axis_name="data",
            head_axis_name="tensor",
            is_causal=True,
        )

    with jax.set_mesh(mesh):
        graph, parameters = nnx.split(Gpt(sizes, attention, dtype, nnx.Rngs(options.seed)))
        parameters = jax.tree_util.tree_map_with_path(
            lambda path, parameter: jax.device_put(
                parameter, NamedSharding(mesh, parameter_spec(path, parameter))
            ),
            parameters,
        )
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3, b2=0.95))
        optimizer_state = jax.jit(optimizer.init)(parameters)

        def loss_of(parameters: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
            logits = nnx.merge(graph, parameters)(tokens, jnp.asarray(positions))
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        @partial(jax.jit, donate_argnums=(0, 1))
        def step(
            parameters: Any, optimizer_state: Any, tokens: jax.Array, labels: jax.Array
        ) -> tuple[Any, Any, jax.Array]:
            loss, gradients = jax.value_and_grad(loss_of)(parameters, tokens, labels)
            updates, optimizer_state = optimizer.update(gradients, optimizer_state, parameters)
            return optax.apply_updates(parameters, updates), optimizer_state, loss

        losses = []
        progress = tqdm(batches(text, sizes, options.seed), desc=f"{mesh.size} devices")
        for batch in progress:
            # Both in zigzag order: the loss is a mean over positions, so their order is free.
            tokens, labels = (
                jax.device_put(part[:, positions], NamedSharding(mesh, TOKENS))
                for part in (batch[:, :-1], batch[:, 1:])
            )
            parameters, optimizer_state, loss = step(parameters, optimizer_state, tokens, labels)
            losses.append(loss)
            if len(losses) % 10 == 0:
                progress.set_postfix(loss=f"{float(loss):.3f}")
    return [float(loss) for loss in losses]


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", choices=PRESETS, help="sizes; default: by the devices")
    parser.add_argument("--simulate", type=int, metavar="DEVICES", help="on a CPU")
    parser.add_argument(
        "--mesh", metavar="DATA,TENSOR,CONTEXT", help="sizes of the axes; default: all devices"
    )
    parser.add_argument("--mode", choices=context_parallel.MODES, default="all_gather")
    parser.add_argument("--dtype", choices=TOLERANCE, help="default: by the devices")
    parser.add_argument("--steps", type=int, help="default: that of the preset")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--compare", action="store_true", help="train on one device, too; fail if losses differ"
    )
    options = parser.parse_args()
    if options.mesh is not None:
        sizes = options.mesh.split(",")
        if len(sizes) != 3 or not all(size.isdigit() and int(size) > 0 for size in sizes):
            parser.error(f"--mesh is {options.mesh}; it must be three sizes, like 2,2,2")
        options.mesh = tuple(map(int, sizes))
    for name in ("steps", "simulate"):
        number = getattr(options, name)
        if number is not None and number < 1:
            parser.error(f"--{name} is {number}; it must be at least 1")
    return options


def main() -> None:
    """Trains, and reports how it went."""
    options = parse_options()
    if options.simulate:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.simulate)
    devices = jax.devices()
    on_gpu = devices[0].platform == "gpu"
    options.dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    preset = PRESETS[options.preset or ("h200" if on_gpu else "small")]
    sizes = preset if options.steps is None else replace(preset, steps=options.steps)
    mesh = make_mesh(sizes, options.mesh, devices)
    text = read_text()
    print(f"mesh: {dict(mesh.shape)} of {devices[0].device_kind}, computing in {options.dtype}")
    print(f"context parallelism: {options.mode}, in zigzag order")
    print(f"unigram entropy: {unigram_entropy(text):.3f} nats a byte")

    start = time.perf_counter()
    losses = train(sizes, mesh, text, options)
    seconds = time.perf_counter() - start
    print(f"trained for {seconds:.0f} s; first loss {losses[0]:.3f}, last loss {losses[-1]:.3f}")
    if not options.compare:
        return
    alone = train(sizes, make_mesh(sizes, (1, 1, 1), devices), text, options)
    difference = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
    print(f"greatest difference to one device's loss: {difference:.2e} nats a byte")
    if difference > TOLERANCE[options.dtype]:
        raise SystemExit(f"that is more than {TOLERANCE[options.dtype]}: losses differ")


if __name__ == "__main__":
    main()
