r"""Parameters that the DPZero paper's theorems prescribe, as plain numbers.

A theorem turns (n, d, epsilon, delta) and constants of the loss into a step size, a number
of steps, a clip and a smoothing radius. It does not choose the noise: plans calibrate that
exactly, for the paper's formula gives two to three times too much at usual budgets, and is
not private for very large epsilon. What the formula gives is reported.

===========  ===========================  ==================  ============================
theorem      algorithm                    constants besides   guarantee on the output
===========  ===========================  ==================  ============================
``"1"``      DPGD-0th                                         E|grad F(x_tau)|^2
``"2"``      DPGD-0th                     r                   E|grad F(x_tau)|^2
``"3"``      DPZero                       r, B_F              E|grad F(x_tau)|^2
``"3'"``     DPZero                       r                   E|grad F(x_tau)|^2
``"F.2"``    DPGD-0th                     mu_PL               none: see below
``"F.3"``    DPGD-0th                     mu_PL, r            none
``"F.4"``    DPZero                       mu_PL, r, B_F       none
===========  ===========================  ==================  ============================

Every theorem takes L, the Lipschitz constant of each record's loss, and :math:`\ell`, its
smoothness. Guarantees also need :math:`\Delta_0`, the loss at x_0 above the least.

3' is Theorem 3 with exact noise, the tight tail of a direction's inner products, no bound
on the values of F, and a smoothing radius that does not shrink with the dimension. The
others' radii are so small that differences of a large model's float32 losses are rounding
error; they are upper bounds, and ``smoothing_radius=0``, forward-mode, satisfies them all.

F.2 to F.4 assume a loss that is Lipschitz, smooth and Polyak-Lojasiewicz on all of R^d.
Only constants are, so these numbers are heuristics and state no bound.

References:
  Zhang, Li, Thekumparampil, Oh, He, `DPZero: Private Fine-Tuning of Language Models
  without Backpropagation <https://arxiv.org/abs/2310.09639>`_, 2024.
"""

import dataclasses
import enum
import math
from collections.abc import Callable
from typing import Literal

from jaxdp import accounting
from jaxdp.core import validate
from jaxdp.core.types import Relation
from jaxdp.mechanism.design import Design


class Theorem(enum.StrEnum):
    """The theorems of the DPZero paper, and 3'.

    Example:
      >>> import jaxdp
      >>> [str(theorem) for theorem in jaxdp.plans.Theorem]
      ['1', '2', '3', "3'", 'F.2', 'F.3', 'F.4']
    """

    ONE = "1"
    TWO = "2"
    THREE = "3"
    THREE_PRIME = "3'"
    F2 = "F.2"
    F3 = "F.3"
    F4 = "F.4"


#: The theorems of each algorithm, by the family of its plan.
FAMILIES: dict[str, tuple[Theorem, ...]] = {
    "dpzero": (Theorem.THREE, Theorem.THREE_PRIME, Theorem.F4),
    "dpgd_zeroth_order": (Theorem.ONE, Theorem.TWO, Theorem.F2, Theorem.F3),
}

#: Constants that a theorem needs besides L and ell.
NEEDS: dict[Theorem, tuple[str, ...]] = {
    Theorem.ONE: (),
    Theorem.TWO: ("effective_rank",),
    Theorem.THREE: ("effective_rank", "value_bound"),
    Theorem.THREE_PRIME: ("effective_rank",),
    Theorem.F2: ("pl_constant",),
    Theorem.F3: ("effective_rank", "pl_constant"),
    Theorem.F4: ("effective_rank", "value_bound", "pl_constant"),
}

Law = Literal["sphere", "rademacher", "gaussian"]


class Prescription(Design):
    """Parameters that a theorem prescribes, and its bound.

    Attributes:
      theorem: its name.
      learning_rate: alpha, the constant step size of plain gradient descent.
      num_steps: T, an integer >= 1.
      l2_clip_norm: C; on one record's slope for DPZero, on the norm of its vector (slope
        times direction) for DPGD-0th.
      smoothing_radius: lambda, in units of the parameters.
      output: ``"random"``, the iterate x_tau of Theorems 1 to 3', or ``"last"``. Where the
        theorem gives less than one step, ``"random"`` with one step, which is x_0: with so
        few records not moving is what it advises (Remark F.5).
      bound: the theorem's guarantee for these integers, on the expected squared gradient
        norm. None without ``initial_gap``, and for F.2 to F.4. L^2 holds always, so a
        larger number says nothing.
      paper_noise_std: standard deviation of the noise on the mean by the paper's formula,
        for comparison with ``plan.noise_std``.
    """

    def __str__(self) -> str:
        """Returns name, learning rate and bound, for one row of a plan's table."""
        bound = "none" if self.bound is None else f"{self.bound:.6g}"
        return f"{self.theorem} (learning_rate {self.learning_rate:.6g}, bound {bound})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Letters:
    """Checked constants in the paper's letters; 0 where a constant is not needed."""

    n: int
    d: int
    eps: float
    lip: float  # L
    ell: float
    r: float
    values: float  # B_F
    mu_pl: float
    s: float  # sensitivity over the clip: 2 for replace-one, else 1
    log: float  # Lambda = log(e + epsilon / delta)
    mu: float  # the largest mu of Gaussian DP within (epsilon, delta)
    law: Law
    per_record_rank: bool

    @property
    def paper_rate(self) -> float:
        """Rate sqrt(Lambda) / (n epsilon): R over the square root of the rank."""
        return math.sqrt(self.log) / (self.n * self.eps)

    @property
    def kappa(self) -> float:
        return self.ell / self.mu_pl

    @property
    def low_rank_rate(self) -> float:
        """Step size of every theorem that knows the effective rank."""
        return 1 / (4 * self.ell * (self.r + 2))

    def paper_noise(self, clip: float, steps: int) -> float:
        sensitivity = self.s * clip / self.n
        return 2 * sensitivity * math.sqrt(2 * steps * self.log) / self.eps

    def exact_noise(self, clip: float, steps: int) -> float:
        return self.s * clip * math.sqrt(steps) / (self.n * self.mu)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Numbers:
    """Values of a theorem's formulas; T is still a real number."""

    rate: float
    steps: float
    clip: float
    radius: float
    # The bound is initial_gap * 4 / (rate * T) + noise_share * noise_std**2 + rest.
    noise_share: float = 0.0
    rest: float = 0.0


def prescribed(
    theorem: str,
    *,
    family: str,
    num_examples: int,
    dim: int,
    epsilon: float,
    delta: float,
    relation: Relation,
    lipschitz: float,
    smoothness: float,
    effective_rank: float | None = None,
    initial_gap: float | None = None,
    value_bound: float | None = None,
    pl_constant: float | None = None,
    direction: Law = "sphere",
    per_record_rank: bool = False,
) -> Prescription:
    r"""Computes the parameters that a theorem prescribes.

    Args:
      theorem: an entry of :class:`Theorem` that belongs to ``family``.
      family: which algorithm: the ``family`` of its plan.
      num_examples: n; the batch is full.
      dim: d, parameters that move.
      epsilon: > 0.
      delta: in (0, 1).
      relation: neighbours. The paper's theorems are about ``"replace_one"``. 3' takes all:
        under the others one record moves the sum half as far, so that its rate is halved.
      lipschitz: L, of every record's loss.
      smoothness: ell, of every record's loss.
      effective_rank: r in [1, d]: some H with :math:`-H\preceq\nabla^2F\preceq H`
        everywhere has norm at most ell and trace at most r times its norm.
      initial_gap: Delta_0 = F(x_0) - min F; only the bound needs it.
      value_bound: B_F, a bound on abs(F) at every iterate.
      pl_constant: mu_PL <= ell.
      direction: law of the directions; ``"gaussian"`` for 3' only, whose clip allows for
        the unbounded norm.
      per_record_rank: 3' only: every record's loss has an envelope H of effective rank r,
        not only their mean. Without it the radius is at most L / (ell d), lest the
        curvature of a single record reach the clip.

    Returns:
      The numbers. A constant that the theorem does not need is checked and not used.

    Raises:
      ValueError: a theorem of another algorithm, a constant that is missing or out of
        range, or a relation or direction that the theorem does not cover. TypeError: not
        a number.
    """
    validate.one_of(tuple(FAMILIES), family=family)
    validate.one_of([str(t) for t in FAMILIES[family]], theorem=theorem)
    chosen = Theorem(theorem)
    validate.integer(num_examples=num_examples, dim=dim)
    validate.positive(epsilon=epsilon, lipschitz=lipschitz, smoothness=smoothness)
    validate.probability(delta=delta)
    given = {
        "effective_rank": effective_rank,
        "value_bound": value_bound,
        "pl_constant": pl_constant,
    }
    _check_constants(chosen, given, initial_gap, dim, smoothness)
    exact = chosen is Theorem.THREE_PRIME
    validate.one_of(accounting.RELATIONS, relation=relation)
    if relation != "replace_one" and not exact:
        raise ValueError(
            f"relation must be 'replace_one' for theorem {theorem!r}, got {relation!r}; "
            '"3\'" takes every relation'
        )
    laws = ("sphere", "rademacher", "gaussian") if exact else ("sphere", "rademacher")
    validate.one_of(laws, direction=direction)
    validate.instance(bool, per_record_rank=per_record_rank)

    problem = _Letters(
        n=int(num_examples),
        d=int(dim),
        eps=float(epsilon),
        lip=float(lipschitz),
        ell=float(smoothness),
        r=float(effective_rank or 0),
        values=float(value_bound or 0),
        mu_pl=float(pl_constant or 0),
        s=accounting.sensitivity(relation, 1.0),
        log=math.log(math.e + epsilon / delta),
        mu=accounting.gaussian_mu(epsilon, delta),
        law=direction,
        per_record_rank=per_record_rank,
    )
    numbers = _FORMULAS[chosen](problem)
    return _settled(chosen, problem, numbers, initial_gap)


def _check_constants(
    theorem: Theorem,
    given: dict[str, float | None],
    initial_gap: float | None,
    dim: int,
    smoothness: float,
) -> None:
    missing = [name for name in NEEDS[theorem] if given[name] is None]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} must be given for theorem {str(theorem)!r}, got None; "
            f"it needs {', '.join(('lipschitz', 'smoothness', *NEEDS[theorem]))}, and "
            "initial_gap for its bound"
        )
    rank, values, pl = given.values()
    if rank is not None:
        validate.positive(effective_rank=rank)
        if not 1 <= rank <= dim:
            raise ValueError(
                f"effective_rank must be a number in [1, dim] = [1, {dim}], got {rank!r}"
            )
    if values is not None:
        validate.non_negative(value_bound=values)
    if initial_gap is not None:
        validate.non_negative(initial_gap=initial_gap)
    if pl is not None:
        validate.positive(pl_constant=pl)
        if pl > smoothness:
            raise ValueError(
                f"pl_constant must be a number in (0, smoothness] = (0, {smoothness}], "
                f"got {pl!r}"
            )


def _settled(
    theorem: Theorem, p: _Letters, numbers: _Numbers, initial_gap: float | None
) -> Prescription:
    """Rounds T down to at least 1 and computes the numbers that depend on it."""
    moves = numbers.steps >= 1
    steps = math.floor(numbers.steps) if moves else 1
    heuristic = theorem in (Theorem.F2, Theorem.F3, Theorem.F4)
    bound: float | None = None
    if not heuristic and not moves:
        bound = p.lip**2  # Of x_0, as of every point.
    elif not heuristic and initial_gap is not None:
        std = p.exact_noise(numbers.clip, steps)
        if theorem is not Theorem.THREE_PRIME:
            # As printed; what a plan adds is less, unless epsilon is very large.
            std = max(std, p.paper_noise(numbers.clip, steps))
        start = 4 * initial_gap / (numbers.rate * steps)
        bound = start + numbers.noise_share * std**2 + numbers.rest
    return Prescription(
        theorem=str(theorem),
        learning_rate=numbers.rate,
        num_steps=steps,
        l2_clip_norm=numbers.clip,
        smoothing_radius=numbers.radius,
        output="last" if heuristic and moves else "random",
        bound=bound,
        paper_noise_std=p.paper_noise(numbers.clip, steps),
    )


# --- the formulas, in the paper's letters ------------------------------------------


def _one(p: _Letters) -> _Numbers:
    big_r = math.sqrt(p.d) * p.paper_rate
    radius = 4 * p.lip / (p.ell * p.d) * math.sqrt(big_r)
    return _Numbers(
        rate=1 / (4 * p.ell * p.d),
        steps=1 / big_r,
        clip=p.lip * p.d,
        radius=radius,
        noise_share=1 / 2,
        rest=(p.ell * radius) ** 2 * p.d**3,
    )


def _two(p: _Letters) -> _Numbers:
    big_r = math.sqrt(p.r) * p.paper_rate
    radius = 4 * p.lip / (p.ell * p.d) * math.sqrt(big_r)
    return _Numbers(
        rate=p.low_rank_rate,
        steps=(p.r + 2) / (p.d * big_r),
        clip=p.lip * p.d,
        radius=radius,
        noise_share=p.r / (2 * (p.r + 2)),
        rest=(p.ell * radius) ** 2 * p.d**3,
    )


def _log_tail(x: float) -> float:
    """Returns log(x), at least 1: x is below e only where the theorem takes no step."""
    return math.log(max(x, math.e))


def _three(p: _Letters) -> _Numbers:
    big_r = math.sqrt(p.r) * p.paper_rate
    values = 8 * p.ell * p.values * (p.r + 2) / p.lip**2
    tail = 2 * math.sqrt(2 * math.pi) * p.n**3 * p.eps**2 * (p.r + 2) * (p.d + values)
    wide = p.lip * math.sqrt(_log_tail(tail / (p.r * p.log)))
    clipped = 4 * (2 - math.sqrt(2)) * wide
    bias = p.lip * math.sqrt(big_r / p.d)
    radius = min(clipped, bias) / (p.ell * p.d)
    return _Numbers(
        rate=p.low_rank_rate,
        steps=(p.r + 2) / (4 * big_r),
        clip=4 * wide,
        radius=radius,
        noise_share=p.r / (2 * (p.r + 2)),
        # Smoothing, and the event that some clip is active.
        rest=(p.ell * radius) ** 2 * p.d**3 + p.lip**2 * big_r,
    )


def _three_prime(p: _Letters) -> _Numbers:
    big_r = p.s * math.sqrt(p.r) / (4 * math.sqrt(2) * p.n * p.mu)
    steps = (p.r + 2) / (4 * big_r)
    radius = 2 * p.lip / p.ell * math.sqrt(big_r / (p.r * (3 * p.r + 8)))
    if not p.per_record_rank:
        radius = min(radius, p.lip / (p.ell * p.d))
    clip = 10 * p.lip  # About what comes out.
    # Clip and failure probability depend on each other by a logarithm: three rounds.
    for _ in range(3):
        share = big_r * p.r * p.lip**2 / (1152 * (p.r + 2) * clip**2)
        # beta, with d beta = share; Gaussian: sqrt(d (d + 2) beta) = share.
        failure = share / p.d
        if p.law == "gaussian":
            failure = share**2 / (p.d * (p.d + 2))
        log = math.log(2 * p.n * max(steps, 1) / failure)
        clip = p.lip * math.sqrt(2 * log) + p.ell * radius / 2 * _quadratic_form(p, log)
    return _Numbers(
        rate=p.low_rank_rate,
        steps=steps,
        clip=clip,
        radius=radius,
        noise_share=p.r / (2 * (p.r + 2)),
        # Smoothing 1, and clipping 0.35.
        rest=1.35 * p.lip**2 * big_r,
    )


def _quadratic_form(p: _Letters, log: float) -> float:
    """Bounds u^T H u / ell for one record, except with probability exp(-log)."""
    if p.law != "gaussian" and not p.per_record_rank:
        return p.d  # The squared norm of u.
    rank = p.r if p.per_record_rank else p.d
    return rank + 2 * math.sqrt(rank * log) + 2 * log


def _f2(p: _Letters) -> _Numbers:
    psi = 1 / (p.kappa * p.d**3 * p.paper_rate**2)
    return _Numbers(
        rate=1 / (4 * p.ell * p.d),
        steps=8 * p.kappa * p.d * math.log(psi),
        clip=p.lip * p.d,
        radius=2 * p.lip / p.ell * p.paper_rate,
    )


def _f3(p: _Letters) -> _Numbers:
    big_r = math.sqrt(p.r) * p.paper_rate
    psi = 1 / (p.kappa * p.d**2 * big_r**2)
    return _Numbers(
        rate=p.low_rank_rate,
        steps=8 * p.kappa * (p.r + 2) * math.log(psi),
        clip=p.lip * p.d,
        radius=2 * p.lip / (p.ell * math.sqrt(p.d)) * big_r,
    )


def _f4(p: _Letters) -> _Numbers:
    big_r = math.sqrt(p.r) * p.paper_rate
    psi = 1 / (p.kappa * big_r**2)
    values = (8 * p.ell * (p.r + 2) + p.mu_pl) * p.values / p.lip**2
    tail = 32 * math.sqrt(2 * math.pi) * p.kappa * p.n**3 * p.eps**2 * (p.r + 2)
    wide = 8 * p.lip * math.sqrt(_log_tail(tail * (p.d + values) / (p.r * p.log)))
    clipped = (2 - math.sqrt(2)) * wide
    bias = 4 * p.lip / math.sqrt(p.d) * big_r
    return _Numbers(
        rate=p.low_rank_rate,
        steps=8 * p.kappa * (p.r + 2) * math.log(psi),
        clip=wide / 2,
        radius=min(clipped, bias) / (2 * p.ell * p.d),
    )


_FORMULAS: dict[Theorem, Callable[[_Letters], _Numbers]] = {
    Theorem.ONE: _one,
    Theorem.TWO: _two,
    Theorem.THREE: _three,
    Theorem.THREE_PRIME: _three_prime,
    Theorem.F2: _f2,
    Theorem.F3: _f3,
    Theorem.F4: _f4,
}
