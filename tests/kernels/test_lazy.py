"""Lazy losses made of plain ones: of modules of several libraries, of single programs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdp
from jaxdp.kernels import finite_difference, perturb, sphere

LAYERS, WIDTH, TABLE = 8, 64, 600
TOKENS = jax.random.randint(jax.random.key(1), (4, 6), 0, TABLE)
BATCH = TOKENS, jnp.array([0, 1, 1, 0])
KEY, SCALE = jax.random.key(5), jnp.float32(0.05)
# Other libraries' code does not promote as strictly as kernels must.
pytestmark = pytest.mark.usefixtures("promotes")


@pytest.fixture
def promotes() -> Any:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


class Case(NamedTuple):
    params: Any
    value_fn: Callable[[Any, Any], jax.Array]
    stacked: Callable[[str], bool]


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        y = nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(y), None


class Linen(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(TABLE, WIDTH)(tokens)
        options: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        blocks = nn.scan(LinenBlock, length=LAYERS, **options)
        x, _ = blocks(name="layers")(x, None)
        return nn.Dense(2)(x.mean(axis=-2))


def linen() -> Case:
    model = Linen()
    params = jax.jit(model.init)(jax.random.key(0), TOKENS)["params"]

    def loss(params: Any, batch: Any) -> jax.Array:
        return cross_entropy(model.apply({"params": params}, batch[0]), batch[1])

    return Case(params, loss, lambda path: path.startswith("layers/"))


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(TABLE, WIDTH, rngs=rngs)
        make: Any = nnx.vmap(NnxBlock, in_axes=0, out_axes=0)
        self.layers = nnx.split_rngs(splits=LAYERS)(make)(rngs)
        self.out = nnx.Linear(WIDTH, 2, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        run: Any = nnx.scan(
            lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )
        return self.out(run(self.table(tokens), self.layers).mean(axis=-2))


def of_nnx() -> Case:
    definition, params = nnx.split(Nnx(nnx.Rngs(0)), nnx.Param)

    def loss(params: Any, record: Any) -> jax.Array:
        return cross_entropy(nnx.merge(definition, params)(record[0]), record[1])

    stacked: Any = lambda path: path.startswith("layers/")  # noqa: E731
    return Case(params, jaxdp.per_record(loss), stacked)


def equinox() -> Case:
    eqx = pytest.importorskip("equinox")

    class Block(eqx.Module):
        up: Any
        down: Any

        def __init__(self, key: jax.Array) -> None:
            one, two = jax.random.split(key)
            self.up = eqx.nn.Linear(WIDTH, 2 * WIDTH, key=one)
            self.down = eqx.nn.Linear(2 * WIDTH, WIDTH, key=two)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + self.down(jax.nn.gelu(self.up(x)))

    keys = jax.random.split(jax.random.key(0), LAYERS)
    arrays, static = eqx.partition(eqx.filter_vmap(Block)(keys), eqx.is_array)
    params = {
        "layers": arrays,
        "table": jax.random.normal(jax.random.key(1), (TABLE, WIDTH)),
    }

    def loss(params: Any, record: Any) -> jax.Array:
        def step(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            return jax.vmap(eqx.combine(layer, static))(x), None

        x, _ = jax.lax.scan(step, params["table"][record[0]], params["layers"])
        return cross_entropy(x.mean(axis=0)[:2], record[1])

    stacked: Any = lambda path: path.startswith("layers/")  # noqa: E731
    return Case(params, jaxdp.per_record(loss), stacked)


CASES = {"linen": linen, "nnx": of_nnx, "equinox": equinox}
cases = pytest.mark.parametrize("name", CASES)


def direction(case: Case, law: str = "rademacher") -> sphere.Direction:
    rows = sphere.directions(KEY, case.params, law=law, stacked=case.stacked)
    return sphere.select(rows, 0)


def assert_same(case: Case, data: Any, law: str = "rademacher", ulps: int = 0) -> None:
    """The lazy loss has the bits of that of perturbed parameters, which differ.

    Or some of the last ones differ, where XLA adds up in another order, as on a GPU.
    """
    ulps = ulps if jax.default_backend() == "cpu" else 4
    loss, params = jaxdp.lazy(case.value_fn), case.params
    one = direction(case, law)
    got = jax.jit(lambda p: perturb.losses_at(loss, p, data, one, SCALE))(params)
    moved = jax.jit(lambda p: perturb.perturb(p, one, SCALE))(params)
    want, base = (jax.jit(case.value_fn)(p, data) for p in (moved, params))
    np.testing.assert_array_max_ulp(np.asarray(got), np.asarray(want), maxulp=ulps)
    assert np.all(np.asarray(want) != np.asarray(base))


@cases
def test_bits_of_perturbed_parameters(name: str) -> None:
    assert_same(CASES[name](), BATCH, ulps=4 if name == "equinox" else 0)


@pytest.mark.slow  # Two more programs; what a law draws is test_perturb.py's.
@pytest.mark.parametrize("law", ["sphere", "gaussian"])
def test_bits_of_other_laws(law: str) -> None:
    assert_same(of_nnx(), BATCH, law)


@cases
def test_memory_of_a_step_is_a_forward_and_a_layer(name: str) -> None:
    """Not the parameters once more, which the plain loss of a perturbed tree needs."""
    case = CASES[name]()

    def step(value_fn: Any, params: Any) -> jax.Array:
        one = direction(case)
        ahead = perturb.losses_at(value_fn, params, BATCH, one, SCALE)
        behind = perturb.losses_at(value_fn, params, BATCH, one, -SCALE, after=ahead)
        return ahead - behind

    def needs(fn: Any) -> int:
        stats: Any = jax.jit(fn).lower(case.params).compile().memory_analysis()
        return stats.temp_size_in_bytes

    leaves = jax.tree.leaves_with_path(case.params)
    layer = sum(
        x.nbytes // LAYERS for p, x in leaves if case.stacked(sphere.path_str(p))
    )
    forward = needs(lambda p: case.value_fn(p, BATCH))
    lazy, plain = (
        needs(lambda p, fn=fn: step(fn, p))
        for fn in (jaxdp.lazy(case.value_fn), case.value_fn)
    )
    assert lazy < forward + 1.5 * layer
    assert plain > forward + 0.9 * LAYERS * layer


def test_gradients_and_plain_values_are_those_of_the_loss() -> None:
    case = linen()
    lazy = jaxdp.lazy(case.value_fn)
    for fn in (lambda f: f, lambda f: jax.grad(lambda p, b: f(p, b).sum())):
        got, want = (jax.jit(fn(f))(case.params, BATCH) for f in (lazy, case.value_fn))
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, got, want)))


@pytest.mark.slow  # Two runs of a network; fit with a lazy loss is in training/, too.
def test_a_run_releases_the_same_numbers() -> None:
    """Of `fit`, with the check of isolation, which looks at a lazy loss in its own way."""
    case = of_nnx()
    plan = jaxdp.plans.DPZero(
        num_examples=4,
        num_steps=3,
        sampling=jaxdp.sampling.FullBatch(),
        relation="replace_one",
        l2_clip_norm=2.0,
        smoothing_radius=1e-2,
    ).with_noise(noise_multiplier=1.0)
    one, other = (
        jaxdp.fit(
            plan,
            jaxdp.Keys.insecure(0),
            case.params,
            BATCH,
            value_fn=fn,
            optimizer=optax.sgd(1e-3),
            stacked=case.stacked,
        ).params
        for fn in (case.value_fn, jaxdp.lazy(case.value_fn))
    )
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, one, other)))
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), one, case.params)
    assert all(jax.tree.leaves(moved))


# --- single programs ---------------------------------------------------------------


def tanh_layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = jnp.tanh(x @ w)
    return x, x.sum(axis=1)


def branches(p: Any, x: jax.Array) -> jax.Array:
    return jax.lax.cond(x[0, 0] > 9, lambda: x @ p["v"], lambda: x @ p["v"].T)


def loop(p: Any, x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ p["v"]), x)


def outside(p: Any, x: jax.Array) -> jax.Array:
    """Rows below, within and beyond the table, with zeros for the last."""
    index = jnp.array([-1, 3, 1, 0])
    found = jnp.take(p["table"], index, axis=0, mode="fill", fill_value=0)
    far = jnp.take(p["table"], index + 60, axis=0, mode="clip")
    beyond = p["table"].at[index + 400].get(mode="fill", fill_value=2.0)
    return x * found + far + beyond


PROGRAMS: dict[str, Callable[[Any, jax.Array], jax.Array]] = {
    "reverse": lambda p, x: jax.lax.scan(tanh_layer, x, p["w"], reverse=True)[0],
    "outputs": lambda p, x: jax.lax.scan(tanh_layer, x, p["w"])[1].T,
    "cast": lambda p, x: jax.lax.scan(
        tanh_layer, x.astype(jnp.bfloat16), p["w"].astype(jnp.bfloat16)
    )[0].astype(jnp.float32),
    "transposed": lambda p, x: jax.lax.scan(tanh_layer, x, p["w"].mT)[0],
    "remat": lambda p, x: jax.lax.scan(jax.checkpoint(tanh_layer), x, p["w"])[0],
    "vectors": lambda p, x: jax.lax.scan(lambda h, b: (h + b, None), x, p["b"])[0],
    "by hand": lambda p, x: tanh_layer(tanh_layer(x, p["w"][0])[0], p["w"][2])[0],
    "in every turn": lambda p, x: jax.lax.scan(
        lambda h, w: (jnp.tanh(h @ w @ p["v"]), None), x, p["w"]
    )[0],
    "a leaf as a result": lambda p, x: jax.lax.scan(
        lambda h, w: (jnp.tanh(h @ w), w), x, p["w"]
    )[1].sum(axis=0),
    "twice": lambda p, x: x @ p["v"] @ p["v"].T,
    "of leaves alone": lambda p, x: x * jax.nn.relu(p["v"]),
    "cond": branches,
    "fori_loop": loop,
    "rows": outside,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_bits_of_a_program(name: str) -> None:
    draw = np.random.default_rng(3)
    shapes = {"w": (4, 4, 4), "b": (4, 4), "v": (4, 4), "table": (64, 4), "d": ()}
    params = {
        n: jnp.asarray(draw.normal(0, 1, s), jnp.float32) for n, s in shapes.items()
    }
    x = jnp.asarray(draw.normal(0, 1, (4, 4)), jnp.float32)

    def value_fn(params: Any, x: jax.Array) -> jax.Array:
        return params["d"] * (PROGRAMS[name](params, x) ** 2) @ jnp.ones(4)

    assert_same(Case(params, value_fn, lambda path: path in "wb"), x, ulps=8)


@pytest.mark.slow  # Two programs of a network.
def test_derivatives_go_through() -> None:
    """A radius of zero, against the slope of the plain loss."""
    case = linen()
    rows = sphere.directions(KEY, case.params, law="gaussian", stacked=case.stacked)

    def slopes(value_fn: Any) -> Any:
        return jax.jit(
            lambda p: finite_difference.slopes(
                value_fn, p, BATCH, rows, smoothing_radius=0.0
            )
        )(case.params)

    got, want = slopes(jaxdp.lazy(case.value_fn)), slopes(case.value_fn)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert np.all(np.abs(want) > 1e-3)


def test_layers_in_a_list_are_perturbed_one_after_the_other() -> None:
    params = [jnp.eye(128) for _ in range(12)]
    x = jnp.ones((4, 128))

    def value_fn(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = jnp.tanh(x @ w)
        return x.sum(axis=1)

    def step(value_fn: Any, params: Any) -> jax.Array:
        one = sphere.select(sphere.directions(KEY, params, law="rademacher"), 0)
        ahead = perturb.losses_at(value_fn, params, x, one, SCALE)
        behind = perturb.losses_at(value_fn, params, x, one, -SCALE, after=ahead)
        return ahead - behind

    def needs(value_fn: Any) -> float:
        """Kernels that a step holds."""
        program = jax.jit(lambda p: step(value_fn, p)).lower(params).compile()
        stats: Any = program.memory_analysis()
        return stats.temp_size_in_bytes / params[0].nbytes

    assert needs(jaxdp.lazy(value_fn)) < 4 < 10 < needs(value_fn)


def view_of(params: Any, stacked: Any = lambda path: False) -> perturb.At:
    rows = sphere.directions(KEY, params, law="rademacher", stacked=stacked)
    return perturb.view(sphere.select(rows, 0), SCALE)


def test_a_loss_that_changed_is_traced_anew() -> None:
    """JAX remembers the program of a function; a module may be in another mode since."""
    factor = {"x": 1.0}
    loss = jaxdp.lazy(lambda w, x: factor["x"] * (x @ w))
    w, x = jnp.ones(3), jnp.ones((2, 3))
    first = loss.fn(w, x, view_of(w))
    factor["x"] = 5.0
    np.testing.assert_array_equal(loss.fn(w, x, view_of(w)), 5 * first)


def test_some_layers_of_a_stack_are_read_by_hand() -> None:
    params = {"w": jax.random.normal(jax.random.key(0), (4, 3, 3))}
    plain: Any = lambda p, x: (x @ p["w"][jnp.array([2, 0])]).sum((0, 2))  # noqa: E731
    case = Case(params, plain, lambda path: path == "w")
    assert_same(case, jnp.ones((2, 3)), ulps=8)


def test_weak_types_are_those_of_perturbed_leaves() -> None:
    w, x = jnp.full((3,), 2.3), jnp.ones((2, 3), jnp.bfloat16)
    assert w.weak_type
    loss = jaxdp.lazy(lambda w, x: (x * w).sum(axis=1))
    assert loss.fn(w, x, view_of(w)).dtype == jnp.float32


def test_weak_types_of_leaves_that_stay_are_kept() -> None:
    params = {"w": jnp.ones(3, jnp.bfloat16), "scale": jnp.full((3,), 2.3)}
    assert params["scale"].weak_type
    plain = lambda p, x: (x * p["w"] * p["scale"]).sum(axis=1)  # noqa: E731
    x = jnp.ones((2, 3), jnp.bfloat16)
    at = view_of({"w": params["w"]})
    got = jaxdp.lazy(plain).fn(params, x, at)
    assert got.dtype == plain(params, x).dtype == jnp.bfloat16
