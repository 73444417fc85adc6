"""The search for a second-order stationary point, written plainly in float64.

One Python loop over iterations and one over records, real numbers instead of a grid, the
noise handed in: slow, and short enough to be read beside the description of the machine
(Liu & Talwar 2025, the digest's sections 2.5 and 2.6), whose parts A to D are marked. Of
the library it uses nothing, and a plan is any object with the fields of ``plans.SOSP``.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

Gradient = Callable[[np.ndarray, Any], np.ndarray]
Product = Callable[[np.ndarray, Any, np.ndarray], np.ndarray]
Hessian = Callable[[np.ndarray, Any], np.ndarray]


class Noise(Protocol):
    """What is added to the releases, in their own units."""

    def base(self, epoch: int) -> np.ndarray:
        """(d,) on the mean gradient of refresh ``epoch``, counted from 0."""
        ...

    def increment(self, epoch: int, k: int) -> np.ndarray:
        """(d,) on the k-th difference (from 0) after that refresh."""
        ...

    def escape(self, step: int) -> np.ndarray:
        """(d,) on the direction of iteration ``step``, counted from 0."""
        ...

    def hessian(self, step: int) -> np.ndarray:
        """Symmetric (d, d), on the mean Hessian released in iteration ``step``."""
        ...


class Silence:
    """No noise."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def base(self, epoch: int) -> np.ndarray:
        return np.zeros(self.dim)

    def increment(self, epoch: int, k: int) -> np.ndarray:
        return np.zeros(self.dim)

    def escape(self, step: int) -> np.ndarray:
        return np.zeros(self.dim)

    def hessian(self, step: int) -> np.ndarray:
        return np.zeros((self.dim, self.dim))


# --- bounded means ---


def scaled(v: np.ndarray, bound: float) -> np.ndarray:
    """``v`` with L2 (of a matrix: Frobenius) norm at most ``bound``; zero if not finite."""
    if not np.isfinite(v).all():
        return np.zeros_like(v)
    norm = np.linalg.norm(v)
    return v * (bound / norm) if norm > bound else v


def squeezed(h: np.ndarray, bound: float) -> np.ndarray:
    """The symmetric ``h`` scaled to an operator norm of at most ``bound``; as above."""
    if not np.isfinite(h).all():
        return np.zeros_like(h)
    norm = np.linalg.norm(h, 2)
    return h * (bound / norm) if norm > bound else h


def clipped_mean(
    values: Sequence[np.ndarray],
    bound: float,
    clip: Callable[[np.ndarray, float], np.ndarray] = scaled,
) -> np.ndarray:
    """The sum of the clipped values over how many there nominally are: all of them."""
    return np.sum([clip(v, bound) for v in values], axis=0) / len(values)


# --- one iteration ---


@dataclasses.dataclass
class State:
    """The table of section 2.5: what an iteration begins with."""

    x: np.ndarray
    x_ref: np.ndarray
    base: np.ndarray
    total: np.ndarray  # exact sum of the mean differences of the epoch
    noise: np.ndarray  # on it
    hess: np.ndarray  # tracked
    x_a: np.ndarray
    g_a: np.ndarray
    h_a: np.ndarray  # tracked: frozen
    best: tuple[np.ndarray, float, int]  # point, norm, rank
    k: int = -1  # differences since the refresh; -1: there was none in this pass
    epoch: int = -1
    drift: float = 0.0
    n_esc: int = 0  # escapes since the refresh
    hcur: tuple[int, int] = (0, 0)  # on demand: the records of the products
    spent: float = 0.0  # on demand: squared budget that this batch has used
    reach: float = 0.0  # tracked: bound on the running mean, in clips
    esc: bool = False
    left: int = 0
    cool: int = 0
    cur: int = 0  # records [0, cur) of this pass are spent
    cur_pass: int = 0  # from 0
    t: int = 0
    done: bool = False
    why: str = ""

    @property
    def gtilde(self) -> np.ndarray:
        return self.base + self.total + self.noise


@dataclasses.dataclass
class Record:
    """What one iteration did, and what it let out."""

    t: int
    branch: str  # "refresh", "difference", "none", or "stopped" before a query
    #: (role, pass, first record, one past the last); roles "gradient", "difference",
    #: "product" (a batch set aside), "hessian", "hessian_difference"
    reads: list[tuple[str, int, int, int]]
    mv: float
    bound: float  # of one record's gradient or difference; 0 where there was no query
    x: np.ndarray
    gtilde: np.ndarray
    norm: float
    triggered: bool = False
    product: np.ndarray | None = (
        None  # mean Hessian times v, in an escape's later steps
    )
    product_bound: float = 0.0
    g: np.ndarray | None = None  # None where no step was taken
    x_new: np.ndarray | None = None
    escaped: bool = False
    failed: bool = False
    filtered: bool = False  # the escape ended because its budget did
    curvature: float | None = None  # released: the least eigenvalue
    # After the iteration:
    x_ref: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    k: int = -1
    epoch: int = -1
    drift: float = 0.0
    n_esc: int = 0
    esc: bool = False
    left: int = 0
    cool: int = 0
    cur: int = 0
    cur_pass: int = 0
    best: tuple[np.ndarray, float, int] = (np.zeros(0), math.inf, -1)
    done: bool = False
    why: str = ""


_AFTER = (
    *("x_ref", "k", "epoch", "drift", "n_esc", "esc", "left", "cool"),
    *("cur", "cur_pass", "best", "done", "why"),
)


def offer(s: State, x: np.ndarray, norm: float, rank: int) -> None:
    """Keeps the highest rank, and of one rank the smallest norm."""
    if (rank, -norm) > (s.best[2], -s.best[1]):
        s.best = (x.copy(), norm, rank)


def next_pass(plan: Any, s: State, need: int) -> bool:
    """Goes to record 0 again, if a pass is left and holds ``need`` records.

    The next gradient query is then a refresh.
    """
    if s.cur_pass + 1 >= plan.sampling.num_passes or need > plan.num_examples:
        return False
    s.cur_pass, s.cur, s.k = s.cur_pass + 1, 0, -1
    return True


def take(s: State, record: Record, role: str, data: Any, size: int) -> list[Any]:
    """The next ``size`` records, spent."""
    rows = range(s.cur, s.cur + size)
    record.reads.append((role, s.cur_pass, rows.start, rows.stop))
    s.cur = rows.stop
    return [data[i] for i in rows]


def begin(plan: Any, x0: np.ndarray) -> State:
    x0 = np.asarray(x0, np.float64)
    zero, square = np.zeros_like(x0), np.zeros((x0.size, x0.size))
    best = (x0.copy(), math.inf, -1)
    return State(
        *(x0.copy(), x0.copy(), zero, zero, zero, square, x0, zero, square, best)
    )


def difference_size(plan: Any, mv: float) -> int:
    """b_t, from public numbers alone."""
    if plan.difference_batch_size is not None:
        return plan.difference_batch_size
    return max(1, math.ceil(plan.difference_batch_rate * mv))


def hessian_difference_size(plan: Any, mv: float) -> int:
    """The same for Hessians, whose rate is of ``rho ||x - x_ref||``.

    The least rate is that at which one record moves the mean as in a refresh.
    """
    rate = plan.hessian_difference_rate
    if rate is None:
        rate = plan.hessian_batch_size / plan.hessian_clip_norm
    return max(1, math.ceil(rate * plan.hessian_lipschitz * mv / plan.smoothness))


def iterate(
    plan: Any,
    s: State,
    data: Any,
    gradient: Gradient,
    hessian_product: Product,
    hessian: Hessian,
    noise: Noise,
) -> Record:
    n, x = plan.num_examples, s.x
    tracked = plan.hessian == "tracked"
    on_demand = plan.hessian == "on_demand"
    clip = squeezed if tracked and plan.hessian_norm == "operator" else scaled
    r = Record(s.t, "none", [], 0.0, 0.0, x.copy(), s.gtilde, math.inf)

    def stop(why: str) -> None:
        s.done, s.why = True, why

    def ended() -> Record:
        for name in _AFTER:
            setattr(r, name, getattr(s, name))
        r.x_ref = s.x_ref.copy()
        return r

    # A. Oracle
    if not s.esc or plan.query_in_escape:
        r.mv = mv = plan.smoothness * float(np.linalg.norm(x - s.x_ref))
        b_t = difference_size(plan, mv)
        b_th = hessian_difference_size(plan, mv) if tracked else 0
        b_h = plan.hessian_batch_size if tracked else 0
        b = plan.refresh_batch_size
        refresh = (
            s.k < 0
            or (not s.esc and s.drift + mv >= plan.drift_limit)
            or (not s.esc and tracked and s.n_esc >= plan.escapes_per_refresh)
            or (tracked and s.reach + b_th / b_h > getattr(plan, "growth_limit", 4.0))
            or s.k + 1 > plan.max_differences
            or (
                plan.difference_batch_size is not None
                and mv > plan.difference_batch_size / plan.difference_batch_rate
            )
        )
        # Nothing moved (a return to the anchor): no query, unless an epoch must begin.
        difference = not refresh and mv > 0
        if difference and s.cur + b_t + b_th > n and next_pass(plan, s, b + b_h):
            refresh, difference = True, False
        if refresh and s.cur + b + b_h > n:
            next_pass(plan, s, b + b_h)
        need = b + b_h if refresh else b_t + b_th if difference else 0
        if s.cur + need > n:
            r.branch = "stopped"
            stop("no records for a query")
            return ended()
        if refresh:
            r.branch, r.bound = "refresh", plan.l2_clip_norm
            rows = take(s, r, "gradient", data, b)
            s.epoch += 1
            mean = clipped_mean([gradient(x, z) for z in rows], r.bound)
            s.base = mean + noise.base(s.epoch)
            s.total, s.noise = np.zeros_like(x), np.zeros_like(x)
            s.k, s.drift, s.n_esc, s.x_ref = 0, 0.0, 0, x.copy()
            if tracked:
                s.reach, rows = 1.0, take(s, r, "hessian", data, b_h)
                s.hess = clipped_mean(
                    [hessian(x, z) for z in rows], plan.hessian_clip_norm, clip
                )
        elif difference:
            r.branch, r.bound = "difference", b_t / plan.difference_batch_rate
            rows = take(s, r, "difference", data, b_t)
            change = [gradient(x, z) - gradient(s.x_ref, z) for z in rows]
            s.total = s.total + clipped_mean(change, r.bound)
            s.noise = s.noise + noise.increment(s.epoch, s.k)
            s.k, s.drift = s.k + 1, s.drift + mv
            if tracked:
                rows = take(s, r, "hessian_difference", data, b_th)
                s.reach += b_th / b_h
                change = [hessian(x, z) - hessian(s.x_ref, z) for z in rows]
                bound = b_th * plan.hessian_clip_norm / plan.hessian_batch_size
                s.hess = s.hess + clipped_mean(change, bound, clip)
            s.x_ref = x.copy()
    gtilde = s.gtilde
    r.gtilde, r.norm = gtilde, float(np.linalg.norm(gtilde))

    # B. Trigger
    if not s.esc:
        may = plan.escape_steps is not None and s.cool <= 0
        if may and r.norm <= plan.trigger_norm:
            offer(s, x, r.norm, 1)
            batch: list[Any] = []
            if not tracked:
                if s.cur + plan.hessian_batch_size > n:
                    next_pass(plan, s, plan.hessian_batch_size)
                if s.cur + plan.hessian_batch_size > n:
                    stop("no records for a Hessian")
                else:
                    role = "product" if on_demand else "hessian"
                    batch = take(s, r, role, data, plan.hessian_batch_size)
                    s.hcur = (s.cur - plan.hessian_batch_size, s.cur)
            if not s.done:
                r.triggered = s.esc = True
                s.left, s.x_a, s.g_a = plan.escape_steps, x.copy(), gtilde
                s.h_a, s.spent, s.n_esc = s.hess, 0.0, s.n_esc + 1
                if plan.hessian == "released":
                    of_batch = [hessian(x, z) for z in batch]
                    mean = clipped_mean(of_batch, plan.hessian_clip_norm)
                    s.h_a = mean + noise.hessian(s.t)
        else:
            offer(s, x, r.norm, 0)
        if s.done:
            return ended()

    # C. Direction
    v = x - s.x_a
    g: np.ndarray | None = gtilde
    if s.esc and plan.hessian == "released":
        # What follows is a function of releases: one step of known length, or none.
        values, vectors = np.linalg.eigh(s.h_a)
        r.curvature = float(values[0])
        g = None
        if values[0] < -plan.curvature_threshold:
            g = leap(plan, s, values, vectors)
    elif s.esc:
        r.product = np.zeros_like(x)
        if on_demand and v.any():
            r.product_bound = product_bound(plan, v)
            if within_budget(plan, s, r.product_bound):
                rows = [data[i] for i in range(*s.hcur)]
                products = [hessian_product(s.x_a, z, v) for z in rows]
                r.product = clipped_mean(products, r.product_bound)
            else:
                r.filtered, r.product, g = True, None, None
        elif tracked:
            r.product = s.h_a @ v
        if r.product is not None:
            g = s.g_a + r.product + noise.escape(s.t)
    r.g = g

    # D. Step
    x_new = s.x_a if g is None else x - g / plan.smoothness
    cool = max(s.cool - 1, 0)
    if s.esc:
        s.left -= 1
        out = float(np.linalg.norm(x_new - s.x_a)) >= plan.escape_radius
        if g is not None and (out or plan.hessian == "released"):
            s.esc, cool, r.escaped = False, 0, True
            if s.best[2] < 2:
                s.best = (x_new.copy(), math.inf, -1)
        elif g is None or s.left <= 0:
            s.esc, cool, r.failed = False, 1, True
            if not r.filtered:
                offer(s, s.x_a, float(np.linalg.norm(s.g_a)), 2)
            x_new = s.x_a.copy()
            if plan.stop_at_certificate and not r.filtered:
                stop("certificate")
    s.cool, s.x, r.x_new = cool, x_new, x_new.copy()
    s.t += 1
    if s.t == plan.num_steps and not s.done:
        stop("out of steps")
    return ended()


def product_bound(plan: Any, v: np.ndarray) -> float:
    """Of one record's product: for the least of 13 halved radii that holds ``||v||``."""
    reach, length = plan.escape_radius, float(np.linalg.norm(v))
    for _ in range(12):
        if length <= reach / 2:
            reach /= 2
    return plan.hessian_clip_norm * reach


def within_budget(plan: Any, s: State, bound: float) -> bool:
    """Without a filter always; with one, what this product costs is written down."""
    if not plan.hessian_filter or not plan.noise_multiplier:
        return True
    if hasattr(plan, "roles"):  # What the library's grid costs besides.
        grid = plan.roles.hessian.grid(len(s.x))
        bound += plan.hessian_clip_norm * grid.rounding
    moved = (2 if plan.relation == "replace_one" else 1) * bound
    cost = (moved / (plan.hessian_batch_size * plan.escape_noise_std)) ** 2
    if s.spent + cost > plan.noise_multiplier**-2:
        return False
    s.spent += cost
    return True


def leap(plan: Any, s: State, values: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """The step of length ``|lambda| / rho`` along the lowest eigenvector, downhill."""
    downhill = -1.0 if s.g_a @ vectors[:, 0] > 0 else 1.0
    length = -values[0] / plan.hessian_lipschitz
    return -plan.smoothness * length * downhill * vectors[:, 0]


def run(
    plan: Any,
    x0: np.ndarray,
    data: Any,
    *,
    gradient: Gradient,
    hessian_product: Product,
    hessian: Hessian,
    noise: Noise,
    points: Sequence[np.ndarray] | None = None,
) -> list[Record]:
    """All iterations.

    Args:
      plan: the fields of ``plans.SOSP``; ``num_passes`` is in its ``sampling``.
      x0: (d,).
      data: ``data[i]`` is record i.
      gradient: of one record's loss, (d,).
      hessian_product: its Hessian times a vector, (d,).
      hessian: its Hessian, (d, d), symmetric.
      noise: of every release.
      points: where iteration t begins, instead of where the one before ended: for
        comparisons step by step, and of two data sets along one path.

    Returns:
      One record for each iteration, of which the last may have stopped before a query.
      The last one's ``best`` is what the run returns.
    """
    s, records = begin(plan, x0), []
    while not s.done:
        if points is not None:
            if s.t >= len(points):
                break
            s.x = np.asarray(points[s.t], np.float64)
        with np.errstate(invalid="ignore"):  # Records may be infinite.
            r = iterate(plan, s, data, gradient, hessian_product, hessian, noise)
        records.append(r)
    return records
