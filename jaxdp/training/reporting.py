"""Report of the privacy that a run has spent, in a dictionary that JSON can hold."""

import importlib.metadata
from typing import Any

import jax
import numpy as np

from jaxdp.core import display
from jaxdp.mechanism.plan import Plan

#: What a report says of time. How long a run takes may depend on records (losses that
#: loop or branch, caches, denormal numbers), and epsilon does not cover it: not public.
TIMING = ("compile_seconds", "train_seconds", "steps_per_second")
#: Number of the format of reports; one without a number is of the first.
FORMAT = 1


@jax.tree_util.register_pytree_with_keys_class
class Report(dict[str, Any]):
    """Report of a run: a dictionary that shows itself as a table.

    Equal to a dictionary of the same entries, and written by ``json`` like one.

    Example:
      >>> report = Report(epsilon=2.0, delta=1e-5, relation="replace_one", private=True)
      >>> report["epsilon"], report == dict(report)
      (2.0, True)
      >>> report
      Report: epsilon 2 at delta 1e-05, replace_one, private
        private  True
    """

    __repr__ = display.as_text
    _repr_html_ = display.as_html

    def _table(self) -> display.Table:
        return display.Table(f"Report: {self.guarantee()}", self.rows())

    def guarantee(self) -> str:
        """Returns what the run guarantees, in one line."""
        epsilon, delta = self.get("epsilon"), self.get("delta")
        private = "private" if self.get("private") is True else "not private"
        if delta is None:
            return f"epsilon is not stated, for want of a delta; {private}"
        if epsilon is None:
            return "epsilon is infinite; not private"
        if self.get("seed_source") == "insecure":
            private = "not private: seeded keys"
        accountant = self.get("accountant")
        under = self.get("relation", "no relation")
        under = f"{under} ({accountant})" if accountant else under
        said = f"epsilon {display.number(epsilon)} at delta {display.number(delta)}"
        return f"{said}, {under}, {private}"

    def rows(self) -> list[tuple[str, str]]:
        """Returns names and values of the other entries, without those on time.

        A display is published with its notebook, and times are not public.
        """
        said = ("format", "epsilon", "delta", "relation", "accountant", *TIMING)
        return [(n, display.number(x)) for n, x in self.items() if n not in said]

    def tree_flatten_with_keys(self) -> tuple[list[Any], tuple[str, ...]]:
        """Returns values and names in sorted order, as JAX takes dictionaries apart."""
        names = tuple(sorted(self))
        return [(jax.tree_util.DictKey(name), self[name]) for name in names], names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: Any) -> "Report":
        """Builds a report from its names and values."""
        return cls(zip(names, values, strict=True))


def report(plan: Plan, state: Any, *, delta: float | None = None) -> Report:
    """Reports the privacy that a run under ``plan`` has spent, for loops written by hand.

    Args:
      plan: the plan.
      state: the transform's state, or a chain's state that starts with it; or what holds
        it as ``opt_state``, as a ``TrainState`` or an ``nnx.Optimizer`` does.
      delta: default is the plan's.

    Returns:
      A dictionary that JSON can hold. ``epsilon`` is the whole plan's at ``delta`` (None
      without a delta or where it is infinite); ``private`` is true only for keys from
      entropy and a finite epsilon.

    Raises:
      ValueError: the state does not come from this plan.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> plan = jaxdp.plans.DPZero(
      ...     num_examples=8, num_steps=3, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", l2_clip_norm=1.0, smoothing_radius=1e-3,
      ... ).with_noise(noise_multiplier=2.0, delta=1e-2)
      >>> state = jaxdp.dpzero(plan, jaxdp.Keys.insecure(0)).init(jnp.zeros(2))
      >>> found = jaxdp.report(plan, state)
      >>> found["steps_done"], found["relation"], found["private"]
      (0, 'replace_one', False)
    """
    state = getattr(state, "opt_state", state)  # Of Flax: a train state, an optimizer.
    if isinstance(state, dict):  # Of optax.named_chain.
        state = tuple(state.values())
    if not hasattr(state, "horizon") and isinstance(state, tuple) and state:
        state = state[0]
    horizon = getattr(state, "horizon", None)
    if horizon is None:
        maker = "algorithm" if plan.runs_algorithm else "transform"
        raise ValueError(
            f"state must be the state of {plan.family}'s releases, as plan.{maker}(keys) "
            "makes it, or of a chain that starts with it; got "
            f"{type(state).__name__}, which counts none"
        )
    want = [int(plan.digest[i : i + 8], 16) for i in (0, 8)]
    if np.asarray(horizon.digest).tolist() != want:
        raise ValueError("state was made by another plan than the one given")
    delta = plan.delta if delta is None else delta
    spent = plan.epsilon(delta=delta) if delta is not None else None
    finite = spent is not None and np.isfinite(spent)
    outcome = plan.outcome(state)
    return Report(
        {
            "format": FORMAT,
            "algorithm": plan.family,
            "num_examples": plan.num_examples,
            "num_steps": plan.num_steps,
            "steps_done": int(horizon.count),
            "relation": plan.relation,
            "sampling": repr(plan.sampling),
            **plan.mechanism(),
            "epsilon": float(spent) if spent is not None and finite else None,
            "delta": delta,
            "accountant": spent.accountant if spent is not None else None,
            "private": bool(np.asarray(horizon.private)) and bool(finite),
            **({"outcome": outcome} if outcome else {}),
            "device": jax.devices()[0].device_kind,
            "versions": versions(),
        }
    )


def versions() -> dict[str, str]:
    """Returns the versions of the packages that compute a run."""
    out = {"jax": jax.__version__}
    for name in ("jaxdp-optim", "jaxlib", "optax", "dp-accounting"):
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "not installed"
        out[name.removesuffix("-optim")] = found
    return out
