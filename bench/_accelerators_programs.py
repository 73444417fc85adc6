"""The programs that are compiled for accelerators: by name, of abstract shapes.

Steps of language models, whole runs of every method, noise and generators. No weight is
ever made.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxdp
from bench import lm_step
from jaxdp import training
from jaxdp.core import keys as keys_lib
from jaxdp.kernels import perturb, prefix_noise, simplex, sphere, threefry
from jaxdp.mechanism.plan import Plan
from jaxdp.models.language import Config, LanguageModel, tasks

#: A configuration, records of a batch and tokens of each.
Shape = tuple[Config, int, int]
MODELS: dict[str, Shape] = {
    **{name: lm_step.LARGE[name] for name in ("RoBERTa-large", "OPT-1.3B", "OPT-13B")},
    "Llama 8B": (lm_step.llama(), 8, 256),
}
LAWS = ("rademacher", "gaussian", "sphere")
#: Numbers of the kernels' arrays.
DIM = 2**20
#: Steps of a period of prefix noise; its std.
PERIOD, NODE_STD = 64, 2**20


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of shapes.

    Attributes:
      name: of the program: what it is of, and what it does.
      build: returns the function and its arguments' shapes; ``build(axis_name)`` for one
        that runs on a mesh.
      group: ``model``, ``fit``, ``noise`` or ``words``.
      donate: places of the arguments whose memory the results take.
    """

    name: str
    build: Callable[..., tuple[Callable[..., Any], tuple[Any, ...]]]
    group: str
    donate: tuple[int, ...] = ()


def with_words(fn: Callable[..., Any], *args: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns a function of words in the place of typed keys, and its shapes.

    Keys have no serialised form, nor shapes that a topology takes; their words have.
    """
    shapes = jax.eval_shape(lambda *a: a, *args)
    flat, tree = jax.tree.flatten(shapes)
    keyed = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in flat]

    def words(x: Any) -> Any:
        return jax.eval_shape(jax.random.key_data, x)

    def run(*given: Any) -> Any:
        leaves = [
            keys_lib.from_words(x) if key else x
            for x, key in zip(jax.tree.leaves(given), keyed, strict=True)
        ]
        return plain(fn(*jax.tree.unflatten(tree, leaves)))

    leaves = [words(x) if key else x for x, key in zip(flat, keyed, strict=True)]
    given = jax.tree.unflatten(tree, leaves)
    return run, tuple(given)


def plain(tree: Any) -> Any:
    """Returns a tree whose keys are words."""

    def shown(x: Any) -> Any:
        key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(x) if key else x

    return jax.tree.map(shown, tree)


# --- steps of language models -------------------------------------------------------


def language_model(shape: Shape) -> tuple[jaxdp.LazyLoss, Any, Any]:
    """A prompt's loss, and shapes of its parameters and of a batch, in bfloat16."""
    config, rows, length = shape
    model = LanguageModel(config=config, compute_dtype="bfloat16")
    loss = tasks.prompt(model, lm_step.WORDS).value_fn
    params = jax.eval_shape(
        lambda key: jax.tree.map(lambda x: x.astype(jnp.bfloat16), model._init(key)),
        jax.random.key(0),
    )
    data = jax.eval_shape(
        lambda: jax.tree.map(
            jnp.asarray, lm_step.batch(rows, length, config.vocab_size)
        )
    )
    return loss, params, data


def forward(shape: Shape) -> tuple[Any, tuple[Any, ...]]:
    """The losses of a batch alone."""
    loss, params, data = language_model(shape)
    return loss, (params, data)


def step(
    shape: Shape, law: str, axis_name: str | None = None
) -> tuple[Any, tuple[Any, ...]]:
    """A donated step of DPZero, as :func:`bench.lm_step.compiled` makes it."""
    loss, params, data = language_model(shape)
    maker: Any = lm_step.plan(shape[1], law).transform(
        jaxdp.Keys.insecure(0), stacked=LanguageModel.is_stacked, axis_name=axis_name
    )
    tx: Any = optax.chain(maker, optax.scale(-1e-6))

    def run(carry: Any, data: Any) -> Any:
        params, state = carry
        updates, state = tx.update(None, state, params, value_fn=loss, batch=data)
        return optax.apply_updates(params, updates), state

    return with_words(run, (params, jax.eval_shape(tx.init, params)), data)


# --- runs of every method -----------------------------------------------------------


def fit(
    plan: Plan, maker: Any, optimizer: Any, value_fn: Any, params: Any, data: Any
) -> tuple[Any, tuple[Any, ...]]:
    """The whole compiled run of a plan, as ``fit`` makes it."""
    program = training.make_program(plan, maker, optimizer, value_fn)
    carry = training.start(plan, maker, optimizer, params)

    def run(carry: Any, keys: Any, data: Any) -> Any:
        return program(carry, keys, data, 0, plan.num_steps)

    return with_words(run, carry, jaxdp.Keys.insecure(3), data)


def fits() -> Iterator[Program]:
    """A small run of every method of the conformance suite's registry."""
    from tests import methods

    for method in methods.METHODS:
        if not method.fits:
            continue

        def build(method: Any = method) -> Any:
            maker = method.make(method.plan, methods.KEYS)
            optimizer = method.optimizer or optax.identity()
            given = method.value_fn, method.params, method.data
            return fit(method.plan, maker, optimizer, *given)

        yield Program(f"fit, {method.name}", build, "fit", (0,))


# --- kernels ------------------------------------------------------------------------

LIKE = jax.ShapeDtypeStruct((DIM,), jnp.float32)
SECRET = jax.ShapeDtypeStruct((4,), jnp.uint32)
PUBLIC = jax.ShapeDtypeStruct((2,), jnp.uint32)


def _public(words: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def _noise(name: str) -> tuple[Any, tuple[Any, ...]]:
    """Adds the noise of a step in the midst of a period to a vector of integers."""
    kernel = prefix_noise.make(name, PERIOD)
    laws = kernel.laws(NODE_STD)

    def run(state: Any, words: Any, step: Any, total: Any) -> Any:
        key = threefry.secret_key(words)
        noise, state = kernel.increment(key, state, step, LIKE, laws)
        return state, total + noise.high

    state = jax.eval_shape(kernel.init, LIKE)
    total = jax.ShapeDtypeStruct((DIM,), jnp.int32)
    return run, (state, SECRET, jax.ShapeDtypeStruct((), jnp.int32), total)


def kernels() -> Iterator[Program]:
    """Noise that is added, perturbation into a product, a draw, and the generators."""
    for name in prefix_noise.NAMES:
        yield Program(f"noise, {name}", lambda n=name: _noise(n), "noise", (0, 3))

    def perturbed(words: Any, w: Any, x: Any, law: str) -> Any:
        rows = sphere.directions(_public(words), w, law=law)
        moved = perturb.perturb(w, sphere.select(rows, 0), jnp.float32(1e-3))
        return x @ moved

    weights = jax.ShapeDtypeStruct((2048, 8192), jnp.bfloat16)
    records = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)
    for law in LAWS:
        yield Program(
            f"perturbed product, {law}",
            lambda law=law: (
                lambda words, w, x: perturbed(words, w, x, law),
                (PUBLIC, weights, records),
            ),
            "noise",
        )
    scores = jax.ShapeDtypeStruct((DIM,), jnp.int32)
    yield Program(
        "vertex draws",
        lambda: (
            lambda words, s: simplex.sample(
                threefry.secret_key(words), simplex.moved(s, s), 3
            ),
            (SECRET, scores),
        ),
        "noise",
    )
    words: dict[str, Any] = {
        "threefry-2x32": (lambda w: threefry.bits(_public(w), (DIM,)), PUBLIC),
        "threefry-4x32": (
            lambda w: threefry.bits(threefry.secret_key(w), (DIM,)),
            SECRET,
        ),
        "hashed normal": (lambda w: threefry.normal(_public(w), (DIM,)), PUBLIC),
    }
    for name, (fn, key) in words.items():
        yield Program(f"words, {name}", lambda f=fn, k=key: (f, (k,)), "words")


def programs() -> dict[str, Program]:
    """Every program of the table, by name; the large ones last."""
    found = [*kernels(), *fits()]
    for name, shape in MODELS.items():
        found += [Program(f"{name}, forward", lambda s=shape: forward(s), "model")]
        for law in LAWS:
            build = functools.partial(step, shape, law)
            found += [Program(f"{name}, {law}", build, "model", (0,))]
    return {program.name: program for program in found}
