"""Trains a small GPT on the source code of Python's standard library, through jax_flash.attention.

    python examples/train_gpt.py                 # about two minutes on a 2-core CPU
    python examples/train_gpt.py --preset h200   # a larger model, for one data-centre GPU

A token is a byte. The model is a pre-norm transformer with rotary positions and grouped-query
attention. On a GPU it computes in bfloat16, which the attention kernels are made for, on a CPU in
float32. The log begins with what `jax_flash.explain` says of the attention calls.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import math
import os
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from tqdm import tqdm

import jax_flash

# Modules that every supported Python has as a single file: about 3 million bytes.
MODULES = """
    argparse ast bdb calendar cmd codecs configparser contextlib copy csv dataclasses difflib
    dis doctest enum fractions ftplib functools gettext glob gzip hashlib heapq imaplib inspect
    ipaddress linecache locale mailbox mimetypes optparse pdb pickle pickletools platform
    plistlib poplib pprint profile pydoc queue random sched selectors shelve shlex shutil
    smtplib socket socketserver ssl statistics string subprocess symtable tarfile tempfile
    textwrap threading timeit tokenize trace traceback turtle typing uuid warnings weakref
    zipapp
"""

VOCABULARY = 256
HELD_OUT_SHARE = 0.1
PROMPT = "class "


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Sizes of the model and of its training.

    Attributes:
        context: bytes that the model sees at once, T.
        layers: transformer blocks.
        query_heads: N.
        key_heads: K.
        head_dim: D; the model is N * D wide.
        batch: sequences of a step.
        steps: of the optimizer.
        learning_rate: at its peak.
        sample_bytes: of text to write at the end.
    """

    context: int
    layers: int
    query_heads: int
    key_heads: int
    head_dim: int
    batch: int
    steps: int
    learning_rate: float
    sample_bytes: int = 400

    @property
    def width(self) -> int:
        """Size of a token's vector."""
        return self.query_heads * self.head_dim


PRESETS = {
    "small": Preset(
        context=128,
        layers=3,
        query_heads=2,
        key_heads=1,
        head_dim=64,
        batch=16,
        steps=400,
        learning_rate=4e-3,
    ),
    "h200": Preset(
        context=2048,
        layers=6,
        query_heads=8,
        key_heads=2,
        head_dim=128,
        batch=16,
        steps=400,
        learning_rate=1e-3,
        sample_bytes=1000,
    ),
}

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def read_text() -> np.ndarray:
    """Returns the bytes of the standard library's modules, uint8."""
    library = Path(sysconfig.get_path("stdlib"))
    return np.frombuffer(
        b"\n".join((library / f"{module}.py").read_bytes() for module in MODULES.split()), np.uint8
    )


def unigram_entropy(text: np.ndarray) -> float:
    """Returns the loss, in nats a byte, of a model that knows how frequent each byte is."""
    shares = np.bincount(text, minlength=VOCABULARY) / len(text)
    shares = shares[shares > 0]
    return float(-(shares * np.log(shares)).sum())


def rotate(heads: jax.Array) -> jax.Array:
    """Applies rotary position embeddings (arXiv:2104.09864) to [batch, T, N, D]."""
    length, half = heads.shape[1], heads.shape[-1] // 2
    frequencies = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None, None] * frequencies
    left, right = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    turned = (left * cosine - right * sine, right * cosine + left * sine)
    return jnp.concatenate(turned, axis=-1).astype(heads.dtype)


class Block(nnx.Module):
    """Attention and a two-layer network, each on normalised input and added to it."""

    def __init__(self, preset: Preset, attention: Attention, dtype: Any, rngs: nnx.Rngs):
        width, self.head_dim = preset.width, preset.head_dim
        key_width = preset.key_heads * preset.head_dim

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

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, T, width] to the same."""
        normed = self.attention_norm(x)
        query, key, value = (
            projected.reshape(*projected.shape[:2], -1, self.head_dim)
            for projected in (self.to_query(normed), self.to_key(normed), self.to_value(normed))
        )
        attended = self.attention(rotate(query), rotate(key), value)
        x = x + self.from_heads(attended.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.network_norm(x))))


class Gpt(nnx.Module):
    """A decoder of bytes."""

    def __init__(self, preset: Preset, attention: Attention, dtype: Any, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(VOCABULARY, preset.width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List(
            [Block(preset, attention, dtype, rngs) for _ in range(preset.layers)]
        )
        self.norm = nnx.RMSNorm(preset.width, dtype=dtype, rngs=rngs)
        self.to_logits = nnx.Linear(
            preset.width, VOCABULARY, use_bias=False, dtype=dtype, rngs=rngs
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """[batch, T] to float32 logits of the next byte, [batch, T, 256]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.to_logits(self.norm(x)).astype(jnp.float32)


def mean_loss(model: Gpt, sequences: jax.Array) -> jax.Array:
    """Mean cross-entropy, in nats a byte, of [batch, T + 1] bytes."""
    logits = model(sequences[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, sequences[:, 1:]).mean()


def draw(text: jax.Array, key: jax.Array, preset: Preset) -> jax.Array:
    """Draws [batch, T + 1] bytes from random places of the text."""
    starts = jax.random.randint(key, (preset.batch, 1), 0, len(text) - preset.context)
    return text[starts + jnp.arange(preset.context + 1)].astype(jnp.int32)


def make_optimizer(preset: Preset) -> optax.GradientTransformation:
    """AdamW with warm-up, cosine decay and clipped gradients."""
    rate = optax.warmup_cosine_decay_schedule(
        0.0, preset.learning_rate, preset.steps // 20, preset.steps, preset.learning_rate / 50
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.1))


def train(
    model: Gpt, preset: Preset, text: np.ndarray, seed: int
) -> tuple[Gpt, list[float], float]:
    """Trains the model.

    Returns:
        The trained model, the loss of every step, and the loss on held-out text at the end.
    """
    split = int(len(text) * (1 - HELD_OUT_SHARE))
    seen, held_out = jnp.asarray(text[:split]), jnp.asarray(text[split:])
    optimizer = make_optimizer(preset)
    graph, parameters = nnx.split(model)
    optimizer_state = optimizer.init(parameters)

    @jax.jit
    def evaluate(parameters: Any, sequences: jax.Array) -> jax.Array:
        return mean_loss(nnx.merge(graph, parameters), sequences)

    def step(parameters: Any, optimizer_state: Any, key: jax.Array) -> tuple[Any, Any, jax.Array]:
        sequences = draw(seen, key, preset)
        loss, gradients = jax.value_and_grad(evaluate)(parameters, sequences)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, parameters)
        return optax.apply_updates(parameters, updates), optimizer_state, loss

    step = jax.jit(step, donate_argnums=(0, 1))
    losses = []
    progress = tqdm(jax.random.split(jax.random.key(seed), preset.steps), desc="training")
    for key in progress:
        parameters, optimizer_state, loss = step(parameters, optimizer_state, key)
        losses.append(loss)
        if len(losses) % 10 == 0:
            progress.set_postfix(loss=f"{float(loss):.3f}")
    keys = jax.random.split(jax.random.key(seed + 1), 8)
    final = np.mean([float(evaluate(parameters, draw(held_out, key, preset))) for key in keys])
    return nnx.merge(graph, parameters), [float(loss) for loss in losses], float(final)


def write_text(model: Gpt, preset: Preset, seed: int) -> str:
    """Returns the prompt and what the model writes after it, at temperature 0.8."""
    graph, parameters = nnx.split(model)
    prompt = PROMPT.encode()
    length = len(prompt) + preset.sample_bytes

    @jax.jit
    def continue_text(parameters: Any, text: jax.Array) -> jax.Array:
        model = nnx.merge(graph, parameters)

        def write(position: jax.Array, text: jax.Array) -> jax.Array:
            # The last `context` bytes before `position`, or the first ones while there are fewer.
            start = jnp.maximum(position - preset.context, 0)
            window = jax.lax.dynamic_slice(text, (start,), (preset.context,))
            logits = model(window[None])[0, position - start - 1]
            key = jax.random.fold_in(jax.random.key(seed), position)
            return text.at[position].set(jax.random.categorical(key, logits / 0.8))

        return jax.lax.fori_loop(len(prompt), length, write, text)

    buffer = np.zeros(max(length, preset.context), np.int32)
    buffer[: len(prompt)] = list(prompt)
    written = np.asarray(continue_text(parameters, jnp.asarray(buffer)))[:length]
    return bytes(written.astype(np.uint8)).decode(errors="replace")


def hash_of(model: Gpt) -> str:
    """Returns the SHA-256 of every parameter's bytes."""
    digest = hashlib.sha256()
    for parameter in jax.tree.leaves(nnx.split(model)[1]):
        digest.update(np.asarray(parameter).tobytes())
    return digest.hexdigest()


def save_losses(directory: Path, losses: list[float], entropy: float, title: str) -> None:
    """Writes loss.csv and loss.png."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "loss.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "loss_nats_per_byte"])
        writer.writerows(enumerate(losses, start=1))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, linewidth=1, label="training loss")
    axes.axhline(entropy, color="grey", linestyle="--", label="unigram entropy")
    axes.set(xlabel="step", ylabel="nats a byte", title=title, ylim=(0, None))
    axes.legend()
    figure.savefig(directory / "loss.png", dpi=150)


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", choices=PRESETS, default="small", help="sizes")
    parser.add_argument("--device", choices=("cpu", "gpu"), help="default: what JAX would use")
    parser.add_argument(
        "--implementation", choices=("cuda", "xla"), help="of attention; default: choose"
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="the same parameters, bit for bit, on every run: compare the hashes that it prints",
    )
    parser.add_argument("--steps", type=int, help="default: that of the preset")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/train_gpt"), help="for loss.csv and loss.png"
    )
    options = parser.parse_args()
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps is {options.steps}; it must be at least 1")
    return options


def choose_device(device: str | None, deterministic: bool) -> Any:
    """Returns the device to train on; must run before JAX makes a backend."""
    if deterministic:
        # Not attention, which has an argument for it: the rest of the model.
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true".strip()
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    chosen = jax.devices()[0]
    if device == "gpu" and chosen.platform != "gpu":
        raise SystemExit(
            f"--device gpu: JAX sees no GPU here, its first device is {chosen}. Install "
            "jax[cuda12] or jax[cuda13] for an NVIDIA GPU, or choose --device cpu."
        )
    return chosen


def main() -> None:
    """Trains, and reports how it went."""
    options = parse_options()
    device = choose_device(options.device, options.deterministic)
    sizes = PRESETS[options.preset]
    preset = sizes if options.steps is None else replace(sizes, steps=options.steps)
    dtype = jnp.float32 if device.platform == "cpu" else jnp.bfloat16
    attention_options: dict[str, Any] = {
        "is_causal": True,
        "deterministic_bwd": options.deterministic,
        "implementation": options.implementation,
    }

    def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return jax_flash.attention(query, key, value, **attention_options)

    heads = [
        jax.ShapeDtypeStruct((preset.batch, preset.context, count, preset.head_dim), dtype)
        for count in (preset.query_heads, preset.key_heads, preset.key_heads)
    ]
    print(f"device: {device.device_kind}, computing in {jnp.dtype(dtype).name}")
    print(jax_flash.explain(*heads, **attention_options))

    text = read_text()
    entropy = unigram_entropy(text)
    model = Gpt(preset, attention, dtype, nnx.Rngs(options.seed))
    count = sum(parameter.size for parameter in jax.tree.leaves(nnx.split(model)[1]))
    print(f"text: {len(text):,} bytes; parameters: {count:,}")
    print(
        f"loss of guessing: {math.log(VOCABULARY):.3f}; unigram entropy: {entropy:.3f} nats a byte"
    )

    start = time.perf_counter()
    model, losses, held_out = train(model, preset, text, options.seed)
    seconds = time.perf_counter() - start
    last = float(np.mean(losses[-20:]))
    print(
        f"trained for {seconds:.0f} s; loss of the last steps: {last:.3f}, held-out: {held_out:.3f}"
    )
    save_losses(options.output, losses, entropy, f"{device.device_kind}, preset {options.preset}")
    print(f"wrote {options.output / 'loss.csv'} and {options.output / 'loss.png'}")
    print(f"sha256 of the parameters: {hash_of(model)}")
    print(f"--- sample ---\n{write_text(model, preset, options.seed)}")


if __name__ == "__main__":
    main()
