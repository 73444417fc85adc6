"""Every kernel lowers for CPU, CUDA and TPU, without the device."""

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest

from jaxdp.kernels import (
    clip,
    finite_difference,
    lattice_gaussian,
    perturb,
    prefix_noise,
    simplex,
    sphere,
    threefry,
)

PARAMS = {"w": jax.ShapeDtypeStruct((6, 4), jnp.float32)}
BATCH = jax.ShapeDtypeStruct((5, 6), jnp.float32)
WORDS = jax.ShapeDtypeStruct((2,), jnp.uint32)
SECRET = jax.ShapeDtypeStruct((4,), jnp.uint32)
STEP = jax.ShapeDtypeStruct((7,), jnp.uint32)  # The key of a role's step.
ROWS = jax.ShapeDtypeStruct((5, 3), jnp.float32)
SCORES = jax.ShapeDtypeStruct((40,), jnp.int32)
MASK = jax.ShapeDtypeStruct((5,), jnp.bool_)


def key(words: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(words, impl="threefry2x32")


secret = threefry.secret_key


def loss(params: Any, batch: jax.Array) -> jax.Array:
    return jnp.square(batch @ params["w"]).sum(axis=1)


def slopes(words: jax.Array, params: Any, batch: jax.Array, law: str) -> Any:
    rows = sphere.directions(key(words), params, law=law, num=2)
    table = finite_difference.slopes(loss, params, batch, rows, smoothing_radius=0.1)
    return table, finite_difference.combine(table[0], rows, params)


def sums(batch: jax.Array) -> jax.Array:
    """A loop over slices of records."""
    ones = jnp.ones(len(batch), bool)
    return finite_difference.sum_microbatches(
        lambda part: jnp.where(part[1], part[0].sum(1), 0).sum(), (batch, ones), 2
    )


def increment(noise_key: jax.Array, kernel: prefix_noise.PrefixNoise) -> Any:
    state = kernel.init(PARAMS)
    return kernel.increment(noise_key, state, jnp.int32(3), PARAMS, kernel.laws(1000))


KERNELS: dict[str, tuple[Any, ...]] = {
    "bits": (lambda w: threefry.bits(key(w), (7, 3)), WORDS),
    "stored_bits": (lambda w: threefry.stored_bits(key(w), 7), WORDS),
    "normal": (lambda w: threefry.normal(key(w), (7,)), WORDS),
    "secret_bits": (lambda w: threefry.bits(secret(w), (7, 3)), SECRET),
    "secret_permuted": (
        lambda w: threefry.permuted(secret(w), jnp.arange(5), 9),
        SECRET,
    ),
    "lattice_gaussian": (
        lambda w: lattice_gaussian.draw(secret(w), (7,), lattice_gaussian.law(2**20)),
        STEP,
    ),
    "lattice_gaussian_fine": (
        lambda w: lattice_gaussian.draw_fine(
            secret(w), (7,), lattice_gaussian.law(2**20, fine=True)
        ),
        STEP,
    ),
    "secret_fold_in": (
        lambda w: jax.random.key_data(threefry.fold_in(secret(w), 3)),
        STEP,
    ),
    "permuted": (lambda w: threefry.permuted(key(w), jnp.arange(5), 9), WORDS),
    **{
        f"flat-{law}": (
            lambda w, law=law: sphere.flat(key(w), 9, law=law, num=3),
            WORDS,
        )
        for law in sphere.LAWS
    },
    **{
        f"slopes-{law}": (
            lambda w, p, b, law=law: slopes(w, p, b, law),
            WORDS,
            PARAMS,
            BATCH,
        )
        for law in sphere.LAWS
    },
    "sums": (sums, BATCH),
    "perturb": (
        lambda w, p: perturb.perturb(
            p,
            sphere.select(sphere.directions(key(w), p, law="sphere"), 0),
            jnp.float32(0.1),
        ),
        WORDS,
        PARAMS,
    ),
    **{
        f"prefix_noise-{name}": (
            lambda w, name=name: increment(secret(w), prefix_noise.make(name, 5)),
            SECRET,
        )
        for name in prefix_noise.NAMES
    },
    "sample": (
        lambda w, s: simplex.sample(key(w), simplex.moved(s, s), 3),
        WORDS,
        SCORES,
    ),
    "secret_sample": (
        lambda w, s: simplex.sample(secret(w), simplex.moved(s, s), 3),
        STEP,
        SCORES,
    ),
    "sample_float": (
        lambda w, s: simplex.sample_float(key(w), s.astype(jnp.float32), 3),
        WORDS,
        SCORES,
    ),
    "clip_vector": (lambda x: clip.clip_vector(x, 1.0), ROWS),
    "grid_sum": (lambda x, m: clip.grid_sum(x, m, 1.0, 16), ROWS, MASK),
    "grid_sum-l1": (lambda x, m: clip.grid_sum(x, m, 1.0, 16, order=1), ROWS, MASK),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_exports_for_every_platform(name: str) -> None:
    fn, *args = KERNELS[name]
    exported = jax.export.export(jax.jit(fn), platforms=["cpu", "cuda", "tpu"])(*args)
    assert exported.platforms == ("cpu", "cuda", "tpu")
