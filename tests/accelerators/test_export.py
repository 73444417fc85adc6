"""Every kernel, transform and whole run lowers for CUDA, ROCm and TPU, without a device.

What is lowered holds no float64, no call back into Python and no routine of a library but
those that are named here; it is serialised and read again.
"""

import ast
import functools
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest

from bench import _accelerators_programs as programs
from bench import lm_step
from jaxdp.kernels import (
    clip,
    finite_difference,
    fixed_point,
    lattice_gaussian,
    lazy,
    node_noise,
    parts,
    perturb,
    polytope,
    prefix_noise,
    simplex,
    smoothed_gradient,
    sphere,
    stochastic_rounding,
    stretch,
    subset,
    threefry,
    toeplitz_noise,
)
from tests import methods

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


def kept_slopes(words: jax.Array, params: Any, batch: jax.Array) -> Any:
    """Of a loss of one record, of directions that are stored."""
    one = finite_difference.per_record(lambda p, x: jnp.square(x @ p["w"]).sum())
    rows = sphere.kept(sphere.directions(key(words), params, law="sphere", num=2))
    return finite_difference.slopes(one, params, batch, rows, smoothing_radius=0.1)


@lazy.lazy
def lazy_loss(params: Any, batch: jax.Array) -> jax.Array:
    """A scan over layers, rows of a table, and a leaf outside of both."""

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w), None

    x = batch @ params["w"] + params["table"][jnp.arange(len(batch)) % 3]
    return jax.lax.scan(layer, x, params["layers"])[0].sum(axis=1)


LAYERS = PARAMS | {
    "layers": jax.ShapeDtypeStruct((3, 4, 4), jnp.float32),
    "table": jax.ShapeDtypeStruct((3, 4), jnp.float32),
}


def lazy_slopes(words: jax.Array, params: Any, batch: jax.Array) -> Any:
    rows = sphere.directions(
        key(words), params, law="gaussian", stacked=lambda path: path == "layers"
    )
    return finite_difference.slopes(
        lazy_loss, params, batch, rows, smoothing_radius=0.1
    )


def smoothed(
    words: jax.Array, params: Any, batch: jax.Array, kind: str | None, ball: bool
) -> Any:
    """Smoothed gradients, or their changes of a kind, of every record, as vectors too."""
    points = params, jax.tree.map(jnp.zeros_like, params)
    law = "ball" if ball else "sphere"
    draw = functools.partial(sphere.directions, like=params, law=law, num=2)
    rest = batch, jnp.arange(len(batch)), key(words), draw
    chosen: dict[str, Any] = {"moves": lambda path: True} if ball else {"share": False}
    if kind is None:
        plain, of_ball = smoothed_gradient.gradients, smoothed_gradient.ball_gradients
        given = points[:1]
    else:
        plain = smoothed_gradient.differences
        of_ball = smoothed_gradient.ball_differences
        given, chosen = points, chosen | {"kind": kind}
    made: Any = of_ball if ball else plain
    tree = made(loss, *given, *rest, smoothing_radius=0.1, **chosen)
    rows = parts.split(tree, lambda path: True)
    return rows, parts.join(rows[0], params, lambda path: True)


def apart(words: jax.Array, params: Any, rows: jax.Array, mask: jax.Array) -> Any:
    """Sums and noise of vectors of which one leaf stays apart, and another does not."""
    tree = {"w": rows[..., None] * params["w"][0, 0], "b": rows}
    like = jax.tree.map(lambda x: x[0], tree)
    shared = parts.leaves_apart(like, {"w": "devices"})
    vectors = parts.split(tree, lambda path: True, shared)
    found = parts.sections(like, lambda path: True, shared)
    noise = node_noise.draw(
        secret(words), jnp.int32(2), found, lattice_gaussian.law(2**20)
    )
    one = lattice_gaussian.draw_at(
        secret(words), node_noise.sections_of(7).index(), lattice_gaussian.law(2**20)
    )
    return clip.grid_sum(vectors, mask, 1.0, 16), noise, one


def stretched(rows: jax.Array, mask: jax.Array, first: jax.Array) -> Any:
    total = stretch.grid_sum(
        jnp.sin, 3, rows, mask, first, 5 - first, bound=1.0, bits=8, size=2
    )
    both = stretch.plus(total, total)
    return total, stretch.to_float(stretch.shifted(both, first))


def sums(batch: jax.Array) -> jax.Array:
    """A loop over slices of records."""
    ones = jnp.ones(len(batch), bool)
    return finite_difference.sum_microbatches(
        lambda part: jnp.where(part[1], part[0].sum(1), 0).sum(), (batch, ones), 2
    )


def increment(noise_key: jax.Array, kernel: prefix_noise.PrefixNoise) -> Any:
    state = kernel.init(PARAMS)
    laws = kernel.laws(1000)
    noise, state = kernel.increment(noise_key, state, jnp.int32(3), PARAMS, laws)
    if kernel.integral:
        return noise, state
    return fixed_point.tree_map(fixed_point.to_float, noise), noise, state


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
    "subset": (
        lambda w: (
            subset.distinct(secret(w), 2**20, 40),
            subset.drawn_size(secret(w), subset.sizes(2**20, 2**17, 60)),
            subset.smallest(secret(w), threefry.bits(secret(w), (900,)), 100, 2**31),
        ),
        SECRET,
    ),
    "secret_fold_in": (
        lambda w: jax.random.key_data(threefry.fold_in(secret(w), 3)),
        STEP,
    ),
    "secret_for_role": (
        lambda w: jax.random.key_data(threefry.for_role(secret(w), 3)),
        SECRET,
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
    "slopes-kept": (kept_slopes, WORDS, PARAMS, BATCH),
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
    "prefix_noise-banded": (
        lambda w: increment(secret(w), toeplitz_noise.SquareRoot(5, bands=3)),
        SECRET,
    ),
    "prefix_noise-own": (
        lambda w: increment(secret(w), toeplitz_noise.Banded(5, (1.0, 0.75, 0.5))),
        SECRET,
    ),
    "lazy": (lazy_slopes, WORDS, LAYERS, BATCH),
    **{
        f"smoothed_gradient-{'ball-' * ball}{kind or 'gradient'}": (
            functools.partial(smoothed, kind=kind, ball=ball),
            WORDS,
            PARAMS,
            BATCH,
        )
        for ball, kinds in (
            (False, smoothed_gradient.KINDS),
            (True, smoothed_gradient.BALL_KINDS),
        )
        for kind in (None, *kinds)
    },
    "parts": (apart, SECRET, PARAMS, ROWS, MASK),
    "stretch": (stretched, ROWS, MASK, jax.ShapeDtypeStruct((), jnp.int32)),
    **{
        f"polytope-{type(of).__name__}": (
            lambda x, of=of: of.vertex_gradient(of.point(x)),
            jax.ShapeDtypeStruct((5, of.num_vertices), jnp.float32),
        )
        for of in (
            polytope.Simplex(3),
            polytope.L1Ball(3, 2.0),
            polytope.Polytope([[0.0, 1.0], [2.0, 1.0], [0.5, 3.0]]),
        )
    },
    **{
        f"stochastic_rounding-{name}": (
            lambda w, x, name=name: stochastic_rounding.add(key(w), x.astype(name), x),
            WORDS,
            ROWS,
        )
        for name in stochastic_rounding.NARROW
    },
    "entropic": (
        lambda s: (
            simplex.normalized(simplex.scaled(s, 3, 2)),
            simplex.entropic_step(s * 0.5, s * 0.1, 0.3),
            simplex.from_probabilities(jnp.abs(s).astype(jnp.float32)),
            simplex.counts(s, 40),
        ),
        SCORES,
    ),
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


#: Public functions of kernels that no program here holds, and why.
NOT_EXPORTED = {
    "clip.grid_bits": "a static number, for a plan",
    "finite_difference.varying": "a question about types",
    "prefix_noise.rounding_shift": "a static number, for the accountant",
    "prefix_noise.sensitivity": "a static number, for the accountant",
    "stochastic_rounding.is_narrow": "a question about a dtype",
}

FOLDER = pathlib.Path(clip.__file__).parent
#: A module and a name in it.
Name = tuple[str, str]


def mentioned(part: ast.AST, own: str, names: dict[str, Name]) -> Iterator[Name]:
    """What of the kernels a part of a file mentions, by the names that it imports."""
    for node in ast.walk(part):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield names.get(node.value.id, ("", ""))[0], node.attr
        elif isinstance(node, ast.Name):
            yield names.get(node.id, (own, node.id))


def imported(tree: ast.Module) -> dict[str, Name]:
    """The kernels' modules, and names of them, by the names that a file has for them."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "jaxdp.kernels":
            found |= {x.asname or x.name: (x.name, "") for x in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            package, _, module = node.module.rpartition(".")
            if package == "jaxdp.kernels":
                found |= {x.asname or x.name: (module, x.name) for x in node.names}
    return found


def test_every_public_function_of_the_kernels_is_in_a_program() -> None:
    """By what they mention, and what that mentions, as far as it leads."""
    uses: dict[Name, set[Name]] = {}
    public: set[Name] = set()
    for path in FOLDER.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            named = [getattr(node, "name", None)] + [
                getattr(x, "id", None)
                for x in getattr(node, "targets", [getattr(node, "target", None)])
            ]
            for name in filter(None, named):
                seen = mentioned(node, path.stem, imported(tree))
                uses.setdefault((path.stem, name), set()).update(seen)
            if isinstance(node, ast.FunctionDef) and node.name[0] != "_":
                public.add((path.stem, node.name))
    here = ast.parse(pathlib.Path(__file__).read_text(encoding="utf-8"))
    waiting = set(mentioned(here, "", imported(here)))
    reached: set[Name] = set()
    while waiting:
        reached |= waiting
        waiting = {x for name in waiting for x in uses.get(name, ())} - reached
    left = {".".join(x) for x in public - reached}
    assert left == set(NOT_EXPORTED)


PLATFORMS = ("cuda", "rocm", "tpu")
#: What programs may call besides what XLA compiles; nothing, where they are not named.
CALLS = {
    # The eigenvalues of a released Hessian.
    "fit, sosp-released": {"cusolver_syevd_ffi", "hipsolver_syevd_ffi", "Eigh"},
}


def check(name: str, fn: Callable[..., Any], args: Any) -> None:
    leaves, structure = jax.tree.flatten(args)

    def flat(*leaves: Any) -> list[Any]:
        """Takes and returns what JAX serialises: no types of the library."""
        return jax.tree.leaves(fn(*structure.unflatten(leaves)))

    exported = jax.export.export(jax.jit(flat), platforms=PLATFORMS)(*leaves)
    text = exported.mlir_module()
    assert not re.search(r"\bf64\b", text)
    called = set(re.findall(r"stablehlo\.custom_call @([\w.$]+)", text))
    assert called <= CALLS.get(name, set())
    again = jax.export.deserialize(exported.serialize())
    assert again.platforms == PLATFORMS
    assert again.mlir_module() == text
    assert again.in_avals == exported.in_avals


@pytest.mark.parametrize("name", KERNELS)
def test_kernel(name: str) -> None:
    fn, *args = KERNELS[name]
    check(name, fn, args)


RUNS = {program.name: program for program in programs.fits()}


@pytest.mark.parametrize("name", RUNS)
def test_run(name: str) -> None:
    fn, args = RUNS[name].build()
    check(name, fn, args)


#: (The registry is complete: tests/test_conformance.py.)
STEPS = [method for method in methods.METHODS if not method.fits]


@pytest.mark.parametrize("method", STEPS, ids=str)
def test_step_of_what_is_no_run(method: methods.Method) -> None:
    tx = method.make(method.plan, methods.KEYS)
    step = functools.partial(methods.stepped(method, tx), phase=method.phases[0])
    state = jax.eval_shape(tx.init, method.params)
    mask = jnp.ones(methods.N, bool)
    given = state, method.params, methods.KEYS, jnp.int32(0), method.data, mask
    fn, args = programs.with_words(step, *given)
    check(method.name, fn, args)


SMALL: dict[str, programs.Shape] = {
    "RoBERTa": (lm_step.config("20 M"), 2, 16),
    "OPT": (lm_step._opt(64, 2, 2), 2, 16),
    "Llama": (lm_step.llama(64, 2, 4, 2, 96, vocabulary=64), 2, 16),
}


@pytest.mark.parametrize("law", programs.LAWS)
@pytest.mark.parametrize("family", SMALL)
def test_step_of_a_language_model(family: str, law: str) -> None:
    fn, args = programs.step(SMALL[family], law)
    check(family, fn, args)


def test_update_of_signs_keeps_the_axis_of_words_on_a_tpu() -> None:
    """Else each sign takes 32 bits there."""
    like = jax.ShapeDtypeStruct((2, 64, 5), jnp.bfloat16)

    def update(words: jax.Array, weight: jax.Array) -> Any:
        rows = sphere.directions(
            key(words), like, law="rademacher", stacked=lambda path: True
        )
        return finite_difference.combine(weight[None], rows, like)

    weight = jax.ShapeDtypeStruct((), jnp.float32)
    barrier = r"optimization_barrier.*tensor<2x2x32x5xbf16>"
    for platform, there in (("tpu", True), ("cuda", False)):
        exported = jax.export.export(jax.jit(update), platforms=[platform])
        text = exported(WORDS, weight).mlir_module()
        assert bool(re.search(barrier, text)) is there
