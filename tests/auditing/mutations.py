"""Faults that an audit has to find: each planted in a copy of the package, and audited.

A fault is a piece of source text and what takes its place. To add one, add a line to
``MUTATIONS``; a piece that is not found exactly once is an error, so that a refactoring
cannot silently lose a fault. ``python -m tests.auditing.mutations [NAME ...]`` runs them.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxdp import plans, sampling

ROOT = Path(__file__).resolve().parents[2]
NUM_RUNS = 20_000

# Runs in the copy, whose package must be the one that is imported.
AUDIT = """
import pathlib, sys, jaxdp.cli
copy, *words = sys.argv[1:]
assert pathlib.Path(jaxdp.cli.__file__).is_relative_to(copy), jaxdp.cli.__file__
sys.exit(jaxdp.cli.main(["audit", *words]))
"""


#: The plans that are audited, by what they change. Each passes where nothing is planted.
PLANS: dict[str, dict[str, Any]] = {
    "full": {"noise_multiplier": 5.3},  # epsilon 1
    "float": {"noise_multiplier": 5.3, "noise": "gaussian"},
    # Where a record may be absent, a mean tells how many there are: epsilon 0.5.
    "absent": {
        "noise_multiplier": 14.0,
        "relation": "add_or_remove",
        "num_examples": 2,
        "num_steps": 4,
    },
    # Epsilon 1.
    "sampled": {
        "noise_multiplier": 0.86,
        "sampling": sampling.TruncatedPoisson(sampling_prob=0.1, max_batch_size=20),
        "num_examples": 20,
        "num_steps": 4,
    },
    # 32 records join a step, and 2 of them are kept: epsilon 0.5.
    "truncated": {
        "noise_multiplier": 1.3,
        "sampling": sampling.TruncatedPoisson(sampling_prob=0.5, max_batch_size=2),
        "num_examples": 64,
        "num_steps": 4,
    },
}


def plan_named(name: str) -> plans.DPZero:
    numbers: dict[str, Any] = {
        "num_examples": 6,
        "num_steps": 2,
        "sampling": sampling.FullBatch(),
        "relation": "replace_one",
        "l2_clip_norm": 0.7,
        "smoothing_radius": 1e-3,
        "delta": 1e-5,
    }
    return plans.DPZero(**numbers | PLANS[name])


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A fault: ``old`` in the file ``path`` becomes ``new``; ``plan`` shows it."""

    name: str
    path: str
    old: str
    new: str
    plan: str

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


DPZERO = "jaxdp/transforms/dpzero.py"
COMMON = "jaxdp/transforms/_common.py"
SCALAR = "jaxdp/oracles/scalar.py"
SAMPLING = "jaxdp/sampling.py"
BASE = "jaxdp/plans/_base.py"

TOTAL = "    total = clip.grid_sum(rows, mask, bound, bits, order=plan.norm_order)\n"
RELEASE = "return _noised(plan, total, noise, bound)"
SECRET = "secret = keys_lib.exact_noise_secret(keys)"
PUBLIC = "np.asarray(jax.random.key_data(keys.direction)).tobytes()"
TABLE = "table = noise_lib.discrete_gaussian(coins, plan.grid_noise_std, shape)\n"

MUTATIONS = (
    Mutation(
        "noise halved",
        BASE,
        "return math.ceil(over_clip * 2**self.grid_bits)",
        "return math.ceil(over_clip * 2**self.grid_bits / 2)",
        "full",
    ),
    Mutation(
        "sensitivity of zero-out for replace-one",
        "jaxdp/accounting/events.py",
        "(2.0 if relation == ",
        "(1.0 if relation == ",
        "full",
    ),
    Mutation(
        "noise from the direction root", DPZERO, SECRET, f"secret = {PUBLIC}", "full"
    ),
    Mutation(
        "float noise from the direction root",
        COMMON,
        'keys_lib.stream(keys.noise, "noise"',
        'keys_lib.stream(keys.direction, "direction"',
        "float",
    ),
    Mutation(
        "three quarters of the noise from the direction root",
        DPZERO,
        TABLE,
        "table = noise_lib.discrete_gaussian(coins, plan.grid_noise_std // 2, shape)\n"
        f"    known = noise_lib.Coins({PUBLIC}, name)\n"
        "    std = round(plan.grid_noise_std * 0.75**0.5)\n"
        "    table = table + noise_lib.discrete_gaussian(known, std, shape)\n",
        "full",
    ),
    Mutation(
        "two steps share one noise",
        DPZERO,
        "jax.lax.dynamic_index_in_dim(state.noise, count, keepdims=False)",
        "jax.lax.dynamic_index_in_dim(state.noise, count // 2, keepdims=False)",
        "full",
    ),
    Mutation(
        "two steps share one float noise",
        COMMON,
        "threefry.wide_normal(keys_lib.at_step(root, step), (size,))",
        "threefry.wide_normal(keys_lib.at_step(root, step // 2), (size,))",
        "float",
    ),
    Mutation(
        "division by the realised batch size",
        SCALAR,
        RELEASE,
        f"{RELEASE} * plan.normalizer / jnp.maximum(mask.sum(), 1)",
        "absent",
    ),
    Mutation(
        "clip after the mean",
        SCALAR,
        TOTAL,
        "    mean = jnp.where(mask[:, None], rows, 0).sum(axis=0) / plan.normalizer\n"
        "    unit = plan.normalizer * 2**bits / bound\n"
        "    total = jnp.round(clip.clip_vector(mean, bound) * unit).astype(jnp.int32)\n",
        "full",
    ),
    Mutation(
        "a record of NaN passes",
        SCALAR,
        TOTAL,
        "    kept = jnp.where(mask[:, None], jnp.clip(rows, -bound, bound), 0)\n"
        "    total = kept.sum(axis=0) * (2**bits / bound)\n",
        "full",
    ),
    Mutation(
        "fixed batches accounted as Poisson",
        SAMPLING,
        "return index, best > -jnp.inf",
        "return jnp.arange(best.size), jnp.ones(best.size, bool)",
        "sampled",
    ),
    Mutation(
        "lowest indices kept on overflow",
        SAMPLING,
        "jnp.where(words < threshold, _score(words), -jnp.inf)",
        "jnp.where(words < threshold, -jnp.arange(1.0 * num_examples), -jnp.inf)",
        "truncated",
    ),
)


def plant(mutation: Mutation | None, folder: Path) -> None:
    """A copy of the package in ``folder``, with the fault.

    Raises:
      ValueError: the piece of text is not there, or more than once.
    """
    leave = shutil.ignore_patterns("__pycache__")
    for name in ("kernels", "jaxdp"):  # jaxdp/kernels is a link to the former.
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=leave)
    if mutation is None:
        return
    path = folder / mutation.path
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        raise ValueError(
            f"{mutation.path} must hold the text of {mutation.name!r} once, but has it "
            f"{text.count(mutation.old)} times: {mutation.old!r}"
        )
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")


def audited(mutation: Mutation | None, plan: str) -> tuple[int, dict[str, Any]]:
    """Exit code and answer of ``jaxdp audit`` in a copy with the fault.

    Raises:
      RuntimeError: the command gave no answer.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        plant(mutation, folder)
        (folder / "plan.json").write_text(plan_named(plan).to_json(), encoding="utf-8")
        words = ["plan.json", "--json", "--num-runs", str(NUM_RUNS)]
        done = subprocess.run(
            [sys.executable, "-c", AUDIT, str(folder), *words],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
    if done.returncode not in (0, 1) or not done.stdout:
        raise RuntimeError(f"{mutation}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.returncode, json.loads(done.stdout)


def main(names: list[str]) -> int:
    """Runs the named mutations, or all, two at a time; 1 if one was not flagged."""
    chosen = [m for m in MUTATIONS if not names or str(m) in names]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda m: audited(m, m.plan), chosen))
    for mutation, (code, answer) in zip(chosen, found, strict=True):
        bounds = f"{answer['epsilon_lower']:7.3f} against {answer['epsilon']:.3f}"
        verdict = "flagged" if code == 1 else "MISSED "
        said = f"{verdict}  {bounds}  {mutation.name}  ({answer['method']})"
        print(said)  # noqa: T201
    return int(any(code != 1 for code, _ in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
