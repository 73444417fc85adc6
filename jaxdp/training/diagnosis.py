"""Diagnosis of a run before it is made: what hides its signal, on public records."""

import dataclasses
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.core import display, run_state, validate
from jaxdp.core.keys import Keys
from jaxdp.core.precision import widened
from jaxdp.core.types import PathPredicate
from jaxdp.kernels.finite_difference import num_rows
from jaxdp.mechanism.plan import Contributions, Plan
from jaxdp.training import isolation, preparing, resolution

_QUANTILES = (0.1, 0.5, 0.9, 0.99)


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Numbers that tell whether a run can learn, and advice on those that are off.

    **Not private**: all but the noise is computed from the records as they are.

    Attributes:
      num_records: B, records that it was made on.
      loss: mean of the finite losses at the start.
      finite: share of records whose loss and contribution are finite; others count zero.
      quantiles: of the contributions' norms over the clip, by 10, 50, 90 and 99%.
      clipped: share of records whose contribution is longer than the clip.
      signal: norm of the mean of the clipped contributions, at the first step.
      noise: norm of the noise on that mean, in root mean square.
      signal_to_noise: of one step.
      signal_to_noise_of_run: of all steps, if all had the first one's signal: noise grows
        with the root of their number, signal with the number.
      gain: what the whole run would lower the loss by, over the loss, if the first step's
        slope stayed; None without an optimizer.
      unmoved: share of moving parameters that a step is too small to change, at their
        dtype (none of 16 bits, which are rounded at random); None without an optimizer.
      advice: a sentence for each number that is off; empty if none is.
    """

    num_records: int
    loss: float
    finite: float
    quantiles: tuple[float, ...]
    clipped: float
    signal: float
    noise: float
    signal_to_noise: float
    signal_to_noise_of_run: float
    gain: float | None
    unmoved: float | None
    advice: tuple[str, ...] = ()

    #: A diagnosis never is.
    private = False

    __repr__ = display.as_text
    _repr_html_ = display.as_html

    def _table(self) -> display.Table:
        said = "not private, for public records alone"
        advice = [("advice", line) for line in self.advice]
        return display.Table(f"Diagnosis: {said}", [*self._rows().items(), *advice])

    def __str__(self) -> str:
        rows = self._rows()
        width = max(map(len, rows))
        lines = [f"{name:<{width}}  {value}" for name, value in rows.items()]
        lines += [f"- {line}" for line in self.advice or ("Nothing looks off.",)]
        return "\n".join(["Not private: read on public records alone.", *lines])

    def _rows(self) -> dict[str, str]:
        """Returns names and values of the numbers, for displays."""
        clips = ", ".join(
            f"{x:.3g} at {q:.0%}"
            for q, x in zip(_QUANTILES, self.quantiles, strict=True)
        )
        rows = {
            "records": f"{self.num_records}, finite {self.finite:.1%}",
            "mean loss": f"{self.loss:.4g}",
            "contribution / clip": f"{clips}; clipped {self.clipped:.1%}",
            "signal / noise": f"{self.signal_to_noise:.3g} a step, "
            f"{self.signal_to_noise_of_run:.3g} over the run",
        }
        if self.gain is not None:
            rows["loss lowered by"] = f"{self.gain:.3g} of it, at the first step's rate"
            rows["parameters unmoved"] = f"{self.unmoved:.1%} a step"
        return rows


def diagnose(
    plan: Plan,
    params: Any,
    records: Any,
    value_fn: Any,
    *,
    optimizer: optax.GradientTransformation | None = None,
    trainable: Any = None,
    stacked: PathPredicate | None = None,
    seed: int = 0,
) -> Diagnosis:
    """Looks at the first step of a run, and says what will keep it from learning.

    Nothing here is bounded or noised: **give public or made-up records**, like the private
    ones, and never show what it says of private ones. No keys are spent.

    Args:
      plan: with noise, of slopes or gradients (``DPZero``, ``DPGD``, ``DPGDZerothOrder``,
        ``O2NC``, ``SOSP``).
      params: where the run starts.
      records: pytree of arrays with leading axis B; a few hundred are enough.
      value_fn: as in :func:`jaxdp.fit`.
      optimizer: as in :func:`jaxdp.fit`; None says nothing of the steps.
      trainable: as in :func:`jaxdp.fit`.
      stacked: as in :func:`jaxdp.fit`.
      seed: of the directions.

    Raises:
      TypeError, ValueError: wrong arguments, named; a plan of another kind.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxdp
      >>> import optax
      >>> plan = jaxdp.plans.DPGD(
      ...     num_examples=1000, num_steps=100, sampling=jaxdp.sampling.FullBatch(),
      ...     relation="replace_one", l2_clip_norm=1.0,
      ... ).calibrate(epsilon=2.0, delta=1e-4)
      >>> found = jaxdp.diagnose(
      ...     plan, jnp.zeros(2), jnp.full((16, 2), 0.2),  # 16 records that are made up
      ...     value_fn=lambda w, x: ((w - x) ** 2).sum(axis=-1), optimizer=optax.sgd(0.1),
      ... )
      >>> found.clipped, found.signal_to_noise > 1
      (0.0, True)
    """
    validate.instance(Plan, plan=plan)
    validate.is_callable(value_fn=value_fn)
    if optimizer is not None:
        preparing.check_optimizer(plan, optimizer)
    params, records = jax.tree.map(jnp.asarray, (params, records))
    moves = run_state.moving(params, trainable)
    parts = plan.contributions(
        value_fn,
        params,
        records,
        Keys.insecure(seed).direction,
        trainable=trainable,
        stacked=stacked,
    )
    losses = np.asarray(value_fn(params, records), np.float64)
    rows = np.asarray(parts.rows, np.float64)
    finite = np.isfinite(rows).all(axis=1) & np.isfinite(losses)
    some = finite.any()
    rows = np.where(finite[:, None], rows, 0.0)
    norms = np.linalg.norm(rows, axis=1)
    factors = np.minimum(1.0, parts.l2_clip_norm / np.maximum(norms, 1e-300))
    signal = float(np.linalg.norm((rows * factors[:, None]).mean(axis=0)))
    noise = parts.noise_std * math.sqrt(rows.shape[1])
    ratio = signal / noise if noise else math.inf
    relative = norms[finite] / parts.l2_clip_norm if some else np.zeros(1)
    found = Diagnosis(
        num_records=num_rows(records),
        loss=float(losses[finite].mean()) if some else math.nan,
        finite=float(finite.mean()),
        quantiles=tuple(float(x) for x in np.quantile(relative, _QUANTILES)),
        clipped=float((relative > 1).mean()),
        signal=signal,
        noise=noise,
        signal_to_noise=ratio,
        signal_to_noise_of_run=ratio * math.sqrt(plan.num_steps),
        gain=None,
        unmoved=None,
    )
    if optimizer is not None:
        steps = _steps(plan, parts, found, params, optimizer, moves)
        found = dataclasses.replace(found, **steps)
    advice = _advice(plan, parts, found)
    advice += _of_losses(plan, params, records, value_fn, trainable)
    return dataclasses.replace(found, advice=tuple(advice))


def _steps(
    plan: Plan,
    parts: Contributions,
    found: Diagnosis,
    params: Any,
    optimizer: optax.GradientTransformation,
    moves: PathPredicate,
) -> dict[str, float]:
    """Returns the gain of a run and the share of parameters that a step leaves.

    The optimizer is asked for its first update, of a gradient of the right size whose
    signs alternate.
    """
    dim = run_state.size(params, moves)
    # A gradient made of K slopes has coordinates of their mean size over the root of K.
    numbers = parts.slopes if parts.slopes else 1
    spread = numbers if parts.slopes else math.sqrt(dim)
    size = math.hypot(found.signal, found.noise) / spread
    params = widened(params)  # As the optimizer sees them; no step of 16 bits is lost.
    gradient = jax.tree.map(
        lambda x: jnp.resize(jnp.asarray([size, -size], x.dtype), x.shape), params
    )
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    total = math.sqrt(dim) * max(size, 1e-300)
    rate = float(optax.tree.norm(updates)) / total  # Step over gradient.
    slope = found.signal / math.sqrt(numbers) if parts.slopes else found.signal
    gain = plan.num_steps * rate * slope**2 / max(abs(found.loss), 1e-300)
    after = optax.apply_updates(params, updates)
    kept = jax.tree.map(lambda a, b: jnp.sum(a == b), params, after)
    return {"gain": gain, "unmoved": float(sum(jax.tree.leaves(kept))) / dim}


def _advice(plan: Plan, parts: Contributions, found: Diagnosis) -> list[str]:
    """Returns a sentence for each number that is off."""
    out, clip = [], parts.l2_clip_norm
    low, middle, _, high = found.quantiles
    if found.finite < 1:
        out.append(
            f"{1 - found.finite:.1%} of the records have a loss or slope that is not "
            "finite, and count zero: look for NaN features and labels that are no class"
        )
    if found.finite > 0 and high == 0:
        out.append(
            "No record's loss changes with the parameters: it is flat at this start "
            "(dead units, a step function), or smoothing_radius is too small"
        )
    elif low > 10:
        out.append(
            f"Nearly every record is clipped, the median to {1 / middle:.2g} of its "
            "length: scale features to [-1, 1], or raise l2_clip_norm towards "
            f"{middle * clip:.2g} and lower the learning rate in proportion"
        )
    elif 0 < high < 0.1:
        out.append(
            f"The clip, {clip:.3g}, is {1 / high:.2g} times what 99% of the records "
            f"need, and the noise is as much larger: lower it to {high * clip:.2g}"
        )
    if found.signal_to_noise_of_run < 1 and high > 0:
        out.append(
            f"Over the whole run the noise is {1 / found.signal_to_noise_of_run:.2g} times "
            "the signal: more records, a larger epsilon, or fewer parameters"
        )
    if found.gain is not None and high > 0 and found.gain < 0.01:
        out.append(
            f"The steps would lower the loss by {found.gain:.1%} of it in the whole run: "
            "raise the learning rate or the number of steps"
        )
    if found.gain is not None and found.gain > 100:
        out.append(
            f"At the first step's rate the run would lower the loss by {found.gain:.0f} "
            "times of it, so the steps go far beyond a minimum: lower the learning rate"
        )
    if found.unmoved is not None and found.unmoved > 0.5:
        out.append(
            f"A step leaves {found.unmoved:.0%} of the parameters where they are, which "
            "are too coarse for it: keep them in float32, or raise the learning rate"
        )
    return out


def _of_losses(
    plan: Plan, params: Any, records: Any, value_fn: Any, trainable: Any
) -> list[str]:
    """Returns what ``fit`` would warn of or refuse: isolation and resolution."""
    out = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        moves = run_state.moving(params, trainable)
        perturbation = plan.perturbation(run_state.size(params, moves))
        resolution.warn_if_unresolved(perturbation, params, trainable=trainable)
        if plan.evaluates_batches:
            shapes = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), records
            )
            try:
                isolation.made_up_check(value_fn, params, shapes)(params)
            except ValueError as error:
                out.append(str(error))
    return out + [str(each.message) for each in caught]
