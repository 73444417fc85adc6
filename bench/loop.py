"""Steps per second of the compiled loop against loops that dispatch step by step.

DPZero on digits: 1437 records, a linear softmax model, Rademacher directions. Everybody
runs the same algorithm: K = 1, central differences, clipped slopes, Gaussian noise,
the same number of steps.

* ``jit, one step at a time``: the same update, jitted, donated, dispatched
  asynchronously from Python with nothing read back: a fair loop.
* ``bare loop``: those steps in one program, without what ``fit`` does beside them. Its
  speed over theirs is what dispatch costs: no loop of these steps gains much more.
* ``NumPy``: written for NumPy, float32, one matrix product per sign, one random draw of
  directions a step.
* ``torch``: the same in torch, where it is installed.

Programs are compiled with the options of ``fit``: on a CPU, vectors of 512 bits.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from bench import _harness
from jaxdp import models, plans, sampling, training
from jaxdp.models import networks

RADIUS, CLIP, RATE = 1e-3, 2.0, 0.03


def run(quick: bool) -> list[_harness.Row]:
    """Rows for full batches and for an expected batch of 64."""
    steps, rounds = (300, 3) if quick else (1000, 9)
    dataset = models.load("digits")
    data = tuple(jnp.asarray(x) for x in dataset.train)
    rows = []
    n = dataset.num_examples
    samplers = {
        "full batch": sampling.FullBatch(),
        "batch 64": sampling.TruncatedPoisson(sampling_prob=64 / n),
    }
    for case, sampler in samplers.items():
        rows += _case(case, sampler, data, n, steps, rounds)
    return rows


def _case(
    case: str, sampler: Any, data: Any, n: int, steps: int, rounds: int
) -> list[_harness.Row]:
    plan = plans.DPZero(
        num_examples=n,
        num_steps=steps,
        sampling=sampler,
        relation="zero_out",
        l2_clip_norm=CLIP,
        smoothing_radius=RADIUS,
        direction="rademacher",
        noise_multiplier=20.0,
    )
    net = networks.linear(64, 10)
    params = net.init(jax.random.key(0))
    keys = jaxdp.Keys.insecure(0)
    maker, optimizer = plan.transform(keys), optax.scale(-RATE)
    tx = optax.chain(maker, optimizer)
    program = training.make_program(plan, maker, optimizer, net.value_fn)
    carry = training.start(plan, maker, optimizer, params)
    whole = jax.jit(lambda c, k, d: program(c, k, d, 0, steps))
    begin = time.perf_counter()
    compiled = _harness.compiled(whole.lower(carry, keys, data))
    compile_seconds = time.perf_counter() - begin

    def one(carry: Any, keys: Any, data: Any) -> Any:
        """A step with its sampling: all that a Python loop dispatches is one program."""
        params, state = carry
        batch = sampling.batch(plan, keys, state[0].count, data)
        update: Any = tx.update
        updates, state = update(None, state, params, value_fn=net.value_fn, batch=batch)
        return optax.apply_updates(params, updates), state

    first = (carry.params, carry.opt_state)
    step = _harness.compiled(jax.jit(one, donate_argnums=0).lower(first, keys, data))

    def many(carry: Any, keys: Any, data: Any) -> Any:
        return jax.lax.fori_loop(0, steps, lambda _, c: one(c, keys, data), carry)

    bare = _harness.compiled(jax.jit(many).lower(first, keys, data))

    def python_loop() -> Any:
        c = jax.tree.map(jnp.array, first)
        for _ in range(steps):
            c = step(c, keys, data)
        return c

    sides: dict[str, Any] = {
        "compiled loop": lambda: compiled(carry, keys, data),
        "jit, one step at a time": python_loop,
        "bare loop": lambda: bare(first, keys, data),
        "NumPy": lambda: _numpy_loop(plan, data, steps),
    }
    skipped = _harness.missing("torch")
    if not skipped:
        sides["torch"] = lambda: _torch_loop(plan, data, steps)
    seconds = _harness.alternate(sides, rounds)
    rows = [
        _harness.Row(case, "compile time", compile_seconds, "s"),
        *(
            _harness.speed(
                case, "steps per second", seconds, "compiled loop", name, steps
            )
            for name in sides
            if name != "compiled loop"
        ),
        _harness.speed(
            case,
            "steps per second without dispatch",
            seconds,
            "bare loop",
            "jit, one step at a time",
            steps,
        ),
    ]
    if skipped:
        rows.append(
            _harness.Row(case, "steps per second", None, skipped, baseline="torch")
        )
    return rows


def _numpy_loop(plan: plans.DPZero, data: Any, steps: int) -> Any:
    """The algorithm as one would write it in NumPy."""
    rng = np.random.default_rng(0)
    x, y = (np.asarray(a) for a in data)
    x1 = np.concatenate([x, np.ones((len(x), 1), np.float32)], axis=1)
    n, full = len(x), isinstance(plan.sampling, sampling.FullBatch)
    prob = plan.normalizer / n
    w = np.zeros((65, 10), np.float32)
    std = np.float32(plan.noise_std)
    noise = rng.normal(size=steps).astype(np.float32) * std
    rows = np.arange(n)

    def losses(
        w: np.ndarray, x: np.ndarray, y: np.ndarray, rows: np.ndarray
    ) -> np.ndarray:
        logits = x @ w
        top = logits.max(axis=1)
        logsum = np.log(np.exp(logits - top[:, None]).sum(axis=1)) + top
        return logsum - logits[rows, y]

    for t in range(steps):
        bx, by, index = x1, y, rows
        if not full:
            chosen = np.flatnonzero(rng.random(n, dtype=np.float32) < prob)
            bx, by, index = x1[chosen], y[chosen], rows[: len(chosen)]
        u = rng.integers(0, 2, size=(65, 10), dtype=np.int8).astype(np.float32) * 2 - 1
        step = np.float32(RADIUS) * u
        slopes = losses(w + step, bx, by, index) - losses(w - step, bx, by, index)
        clipped = np.clip(slopes / np.float32(2 * RADIUS), -CLIP, CLIP)
        release = clipped.sum() / np.float32(plan.normalizer) + noise[t]
        w -= np.float32(RATE) * release * u
    return w


def _torch_loop(plan: plans.DPZero, data: Any, steps: int) -> Any:
    """The algorithm as one would write it in torch."""
    import torch  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    x, y = (
        torch.from_numpy(np.array(data[0])),
        torch.from_numpy(np.array(data[1])).long(),
    )
    x1 = torch.cat([x, torch.ones(len(x), 1)], dim=1)
    n, full = len(x), isinstance(plan.sampling, sampling.FullBatch)
    prob = plan.normalizer / n
    w = torch.zeros(65, 10)
    noise = torch.randn(steps) * plan.noise_std
    loss = torch.nn.functional.cross_entropy
    with torch.no_grad():
        for t in range(steps):
            bx, by = x1, y
            if not full:
                chosen = (torch.rand(n) < prob).nonzero()[:, 0]
                bx, by = x1[chosen], y[chosen]
            u = torch.randint(0, 2, (65, 10), dtype=torch.float32) * 2 - 1
            plus = loss(bx @ (w + RADIUS * u), by, reduction="none")
            minus = loss(bx @ (w - RADIUS * u), by, reduction="none")
            clipped = ((plus - minus) / (2 * RADIUS)).clamp(-CLIP, CLIP)
            release = clipped.sum() / plan.normalizer + noise[t]
            w -= RATE * release * u
    return w
