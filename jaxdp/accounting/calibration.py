"""Calibration: the least noise, or the most steps, within a privacy budget."""

import functools
import math
from collections.abc import Callable

from jaxdp.accounting import spending
from jaxdp.accounting.events import Guarantee
from jaxdp.accounting.gaussian import gaussian_mu, raised_until, root
from jaxdp.core import validate

#: Multiples of the interval of PLD's grid that estimate epsilon, from the cheapest to the
#: best; and the step of log noise below which the next ones take over.
_COARSER = (((32,), 0.05), ((16, 32), 0.01), ((8, 16), 1e-3), ((4, 8, 16), math.inf))
#: What calibration may leave of epsilon, where no closed form is accounted.
_LEFT = 1e-5
#: Epsilon over what is asked for, as far as it is told apart.
_MOST = 1e6
#: What it may leave where the accountant's tables are rounded by as much.
_ROUNDED = 1e-4


def calibrate_noise_multiplier(
    make_guarantee: Callable[[float], Guarantee], epsilon: float, delta: float
) -> float:
    """Finds the least noise of a family of guarantees that stays within (epsilon, delta).

    Args:
      make_guarantee: from a noise_multiplier to its guarantee; more noise costs less.
      epsilon: > 0.
      delta: in (0, 1), or 0 for a pure guarantee.

    Returns:
      The noise_multiplier. It never costs more than ``epsilon``, and is the least one to
      within 1e-12 of itself for closed forms, 1e-5 for other accountants, and 1e-4 where
      their tables of very small losses are rounded by as much. Where epsilon jumps from one
      noise to the next, less than asked for is spent. (Coarser grids say where to look;
      what is returned was accounted in full.)

    Raises:
      ValueError: an argument is out of range, or no noise_multiplier costs as little (or
        as much) as ``epsilon``.
    """
    validate.positive(epsilon=epsilon)

    @functools.cache
    def excess(log_noise: float) -> float:
        spent = spending.epsilon(*make_guarantee(math.exp(log_noise)), delta)
        return min(spent / epsilon, _MOST) - 1

    guess = _guess(make_guarantee, epsilon, delta)
    estimated = _estimated(make_guarantee, epsilon, delta, guess)
    if estimated:
        guess, slope = estimated
        before: tuple[float, float] | None = None
        tried: dict[float, float] = {}
        for _ in range(5):
            over = excess(guess)
            if -_LEFT <= over <= 0:
                return math.exp(guess)
            short = math.log1p(max(over, -0.5)) + _LEFT / 2
            slope = _secant(before, (guess, short), slope)
            before = guess, short
            tried[over] = guess
            guess -= short / slope
        # Tables of very small losses are rounded by more than is looked for here.
        best = max((over for over in tried if over <= 0), default=-1.0)
        if best >= -_ROUNDED:
            return math.exp(tried[best])
    low, high = _bracket(excess, guess, epsilon)
    spent = spending.epsilon(*make_guarantee(math.exp(high)), delta)
    tolerance = 1e-6 if spent.accountant in spending.NAMES.values() else 1e-15
    return raised_until(
        lambda m: spending.epsilon(*make_guarantee(m), delta) <= epsilon,
        math.exp(root(excess, low, high, tolerance)),
        tolerance,
    )


def _guess(
    make_guarantee: Callable[[float], Guarantee], epsilon: float, delta: float
) -> float:
    """Guesses the logarithm of the noise from the central limit theorem."""
    if delta == 0:
        return 0.0  # Pure costs just add up: any start will do.
    target = gaussian_mu(epsilon, delta)

    # The mu of the central limit theorem; exact for closed forms.
    def excess_mu(log_noise: float) -> float:
        return min(_mu(make_guarantee(math.exp(log_noise))) / target, 1e6) - 1

    known = excess_mu(-7.0) > 0 > excess_mu(40.0)
    return root(excess_mu, -7.0, 40.0) if known else 0.0


def _estimated(
    make_guarantee: Callable[[float], Guarantee],
    epsilon: float,
    delta: float,
    log_noise: float,
) -> tuple[float, float] | None:
    """Estimates the logarithm of the noise, and the slope of log epsilon there.

    Takes secant steps through cheap estimates, and none back to where the cost was
    infinite. Returns None where there are no estimates. The result only says where to look.
    """
    slope, floor = -1.2, -math.inf
    for coarser, close in _COARSER:
        before: tuple[float, float] | None = None
        for _ in range(8):
            guarantee = make_guarantee(math.exp(log_noise))
            try:
                spent = spending.estimated_epsilon(*guarantee, delta, coarser)
            except OverflowError:  # Of a loss below a coarse grid's interval.
                return None
            # Far off: the guess is of no use where it is small.
            if spent in (0, math.inf):
                floor = max(floor, log_noise) if spent else floor
                log_noise += 0.5 if spent else -0.5
                continue
            if not spent > 0:
                return None
            over = math.log(spent / epsilon) + _LEFT / 2
            slope = _secant(before, (log_noise, over), slope)
            before = log_noise, over
            move = min(max(-over / slope, -1.0), 1.0)
            if log_noise + move <= floor:
                move = (floor - log_noise) / 2
            log_noise += move
            if abs(move) < close:
                break
    return log_noise, slope


def _secant(
    before: tuple[float, float] | None, now: tuple[float, float], slope: float
) -> float:
    """Returns the slope through two points, kept to what log epsilon can have."""
    if before is None or before[0] == now[0]:
        return slope
    slope = (now[1] - before[1]) / (now[0] - before[0])
    return min(max(slope, -20.0), -0.9)


def _mu(guarantee: Guarantee) -> float:
    leaves = spending.leaves_of(*guarantee)
    return spending.total_mu(leaves, guarantee.event_relation)


def _bracket(
    excess: Callable[[float], float], guess: float, epsilon: float
) -> tuple[float, float]:
    """Returns points near the guess with excess > 0 and <= 0, for a decreasing function."""
    low = high = guess
    # Epsilon falls at least as fast as the noise grows, so one step mostly suffices.
    step = 0.001 + 1.1 * abs(math.log1p(max(excess(guess), -0.9)))
    while excess(high) > 0 and step < 50:
        low, high, step = high, high + step, 2 * step
    while excess(low) <= 0 and step < 50:
        low, high, step = low - step, low, 2 * step
    for bound, noise, far in (
        ("larger", high, excess(high) > 0),
        ("smaller", low, excess(low) <= 0),
    ):
        if far:
            times = 1 + excess(noise)
            most = times >= _MOST
            raise ValueError(
                f"{'epsilon or delta' if most else 'epsilon'} must be {bound}, got epsilon "
                f"= {epsilon:.4g}: noise_multiplier = {math.exp(noise):.3g} is charged "
                f"{times:.3g} times as much{' or more' if most else ''}"
            )
    return low, high


def calibrate_num_steps(
    make_guarantee: Callable[[int], Guarantee],
    epsilon: float,
    delta: float,
    *,
    max_steps: int = 1_000_000,
) -> int:
    """Finds the most steps of a family of guarantees that stay within (epsilon, delta).

    As :func:`calibrate_noise_multiplier`, with guarantees by the number of steps (more
    steps cost more), of which the answer is never more than ``max_steps``. ValueError also
    if a single step costs more than ``epsilon``.
    """
    validate.positive(epsilon=epsilon)
    validate.integer(max_steps=max_steps)

    def spent(steps: int) -> float:
        return spending.epsilon(*make_guarantee(steps), delta)

    first = _mu(make_guarantee(1))
    known = first > 0 and delta != 0
    guess = (gaussian_mu(epsilon, delta) / first) ** 2 if known else 1e3
    affordable, excessive = 0, max_steps + 1
    points: list[tuple[float, float]] = []
    while excessive - affordable > 1:
        steps = round(min(max(guess, affordable + 1), excessive - 1))
        cost = spent(steps)
        if cost <= epsilon:
            affordable = steps
        else:
            excessive = steps
        if 0 < cost < math.inf and len(points) < 10:
            points.append((math.log(steps), math.log(cost)))
            guess = _extrapolate(points, math.log(epsilon))
        else:
            guess = (affordable + excessive) / 2
    if affordable == 0:
        raise ValueError(
            f"epsilon must be at least {spent(1):.6g}, the cost of one step at "
            f"delta={delta!r}; got {epsilon!r}"
        )
    return affordable


def _extrapolate(points: list[tuple[float, float]], log_epsilon: float) -> float:
    """Returns the steps at which the line through the last two points meets epsilon."""
    x, y = points[-1]
    slope = 0.5
    if len(points) > 1 and x != points[-2][0]:
        slope = (y - points[-2][1]) / (x - points[-2][0])
    slope = min(max(slope, 0.2), 10.0)
    return math.exp(min(x + (log_epsilon - y) / slope, 50.0))
