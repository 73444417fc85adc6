"""Step time of DPZero over two forward passes of the same compiled loss.

Two MLPs of 5 M parameters, evaluated lazily: each layer's perturbed weights are formed
when the layer's input is there. In the wide one (784-1536-1536-1024-10) the largest
layer alone is 0.46 of the parameters; the deep one (784-1024-1024-1024-1024-1024-10) has
layers of one size. The baseline is the unperturbed loss on the same batch, twice; both
sides alternate in one process, compiled with the options of ``fit``: on a CPU, vectors of
512 bits.

``directions alone`` is a step without its forward passes: a direction is drawn and added to
the parameters three times, for both signs and the update, as no step can avoid that keeps
no direction. For normals, with the two forwards, it is about what a step can cost at
least; signs are added within the products, for less.

``temp`` is the compiled step's temporary memory over the bytes of the parameters: whole,
and beyond what one forward pass needs.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from bench import _harness, kernels
from jaxdp import plans, sampling
from jaxdp.kernels import perturb
from jaxdp.models import networks

NETWORKS = {
    "wide": (784, 1536, 1536, 1024, 10),
    "deep": (784, 1024, 1024, 1024, 1024, 1024, 10),
}
LAWS = ("rademacher", "gaussian", "sphere")
LOOP_STEPS = 20


def _data(rows: int, widths: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, widths[0])).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(rng.integers(0, widths[-1], rows))


def _plan(rows: int, law: str) -> plans.DPZero:
    return plans.DPZero(
        num_examples=rows,
        num_steps=100_000,
        sampling=sampling.FullBatch(),
        relation="zero_out",
        l2_clip_norm=1e3,
        smoothing_radius=1e-3,
        direction=law,  # pyright: ignore[reportArgumentType]
        noise_multiplier=1.0,
    )


def run(quick: bool) -> list[_harness.Row]:
    """Rows for both networks, batch 256 and 1024, every law, a step alone and in a loop."""
    if quick:
        return _rows("wide", 256, ("rademacher", "gaussian"), rounds=9, loop_rounds=3)
    rows: list[_harness.Row] = []
    for name in NETWORKS:
        for batch in (256, 1024):
            rows += _rows(name, batch, LAWS, rounds=21, loop_rounds=5)
    return rows


def _rows(
    name: str, batch: int, laws: tuple[str, ...], *, rounds: int, loop_rounds: int
) -> list[_harness.Row]:
    widths = NETWORKS[name]
    net = networks.mlp(widths[0], widths[-1], hidden=widths[1:-1], output_scale=0.03)
    data = _data(batch, widths)
    start = net.init(jax.random.key(0))
    size = sum(4 * x.size for x in jax.tree.leaves(start))
    loss = perturb.LazyLoss(net.lazy_fn)

    forward = _harness.compiled(jax.jit(loss).lower(start, data))
    forward_temp = _harness.temp_bytes(forward)

    def many(p: Any, d: Any) -> jax.Array:
        """The loop's own baseline: as many forwards as its steps make, in a loop."""

        def body(i: jax.Array, total: jax.Array) -> jax.Array:
            x = d[0] + 0 * total[0]  # Depends on the round before: not hoisted.
            return total + loss(p, (x, d[1])) * (i + 1)

        return jax.lax.fori_loop(0, 2 * LOOP_STEPS, body, jnp.zeros(batch))

    forward_loop = _harness.compiled(jax.jit(many).lower(start, data))

    step_sides: dict[str, Any] = {
        "two forwards": lambda: (forward(start, data), forward(start, data))
    }
    loop_sides: dict[str, Any] = {
        "forwards in a loop": lambda: forward_loop(start, data)
    }
    memory = {}
    for law in laws:
        step, loop, memory[law] = _compiled(law, batch, loss, start, data)
        step_sides[law], loop_sides[law] = step, loop
        step_sides[f"{law} alone"] = kernels.added(law, 1, 3, start)

    seconds = _harness.alternate(step_sides, rounds)
    loop_seconds = _harness.alternate(loop_sides, loop_rounds)
    rows = []
    for law in laws:
        case = f"{law}, {name}, batch {batch}"
        rows.append(_harness.paired(case, "one step", seconds, law, "two forwards"))
        rows.append(
            _harness.paired(
                case,
                "step in the loop",
                loop_seconds,
                law,
                "forwards in a loop",
                per=LOOP_STEPS,
            )
        )
        rows.append(
            _harness.paired(
                case, "directions alone", seconds, f"{law} alone", "two forwards"
            )
        )
        temp = memory[law]
        rows.append(_harness.Row(case, "temp over parameters", temp / size, "ratio"))
        beyond = (temp - forward_temp) / size
        rows.append(_harness.Row(case, "temp beyond a forward", beyond, "ratio"))
    return rows


def _compiled(
    law: str, batch: int, loss: Any, params: Any, data: Any
) -> tuple[Any, Any, int]:
    """One donated step and a loop of steps, as thunks, and the step's temp bytes."""
    plan = _plan(batch, law)
    keys = jaxdp.Keys.insecure(0)
    tx = optax.chain(plan.transform(keys), optax.scale(-1e-6))
    copy = jax.tree.map(jnp.array, params)  # Donated below.
    carry = (copy, tx.init(copy))

    def one(carry: Any, data: Any) -> Any:
        params, state = carry
        update: Any = tx.update
        updates, state = update(None, state, params, value_fn=loss, batch=data)
        return optax.apply_updates(params, updates), state

    def many(carry: Any, data: Any) -> Any:
        return jax.lax.fori_loop(0, LOOP_STEPS, lambda _, c: one(c, data), carry)

    step = _harness.compiled(jax.jit(one, donate_argnums=0).lower(carry, data))
    loop = _harness.compiled(jax.jit(many, donate_argnums=0).lower(carry, data))
    cells = {"step": carry, "loop": jax.tree.map(jnp.array, carry)}

    def call(name: str, program: Any) -> Any:
        cells[name] = program(cells[name], data)
        return cells[name]

    temp = _harness.temp_bytes(step)
    return (
        functools.partial(call, "step", step),
        functools.partial(call, "loop", loop),
        temp,
    )
