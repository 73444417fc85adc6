"""Audits of functions that release, and have no plan of their own for ``jaxdp audit``.

* ``private_gap``: called as it is, on the two data sets that its proof says are worst.
* ``private_goldstein``: its compiled step is called, with the plan that the function makes.
  All else in its result follows from that release and public numbers.
* ``tune``: its loop over trials is called, and the law of their number is enumerated. Each
  toss of its coins is taken both ways, with the probability that the code gives it. A trial
  is the worst that a plan of Laplace noise allows, and its score what it releases.

As in :func:`jaxdp.auditing.audit` the direction root is everybody's.
"""

import collections
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import accounting, metrics, sampling, tuning
from jaxdp.auditing import attacks, bounds, simulation
from jaxdp.auditing._audit import AuditResult, result_of
from jaxdp.core import keys as keys_lib
from jaxdp.core.keys import Keys
from jaxdp.dpzero.plan import DPZero
from jaxdp.metrics.private_goldstein import plan_of, step_of
from jaxdp.saddle.oracles import Problem

_DELTA, _FAILURE = 1e-5, 1e-6
#: Shares of the runs that learn the attack and that choose its threshold.
_LEARN, _CHOOSE = 0.05, 0.1
#: Mean number of trials of the search, and of its candidates.
_TRIALS = 8
#: Tosses less likely than this are not followed, and count against the attack.
_LEAST = 2.0**-16


def private_gap(num_runs: int = 400, *, seed: int = 0) -> AuditResult:
    """Audits the private gap of four records, one of which is replaced.

    Args:
      num_runs: of each of two neighbouring data sets.
      seed: of insecure keys.

    Returns:
      A bound on epsilon from below that fails with probability 1e-6 at most.

    Example:
      >>> from jaxdp.auditing import functions
      >>> functions.private_gap(2000).passed  # doctest: +SKIP
      True
    """
    # Least at vertex 1 of x and largest at vertex 1 of y, whatever the first record is.
    x, y = np.tile([0.0, -9, 9], (2, 4, 1)), np.tile([0.0, 9], (2, 4, 1))
    x[:, 0], y[:, 0] = [[9, -9, 9], [-9, 9, 9]], [[-9, 9], [9, -9]]
    problem = Problem(lambda x, y, batch: batch[0] @ x + batch[1] @ y)

    def released(keys: Keys, data: Any) -> Any:
        return metrics.private_gap(
            problem,
            np.eye(3)[0],
            np.eye(2)[0],
            data,
            keys,
            noise_multiplier=0.6,
            relation="replace_one",
            linf_clip_norm_x=1.0,
            linf_clip_norm_y=0.5,
            num_examples=4,
        )

    public = Keys.insecure(seed)
    runs = [_known(keys_lib.trial(public, i), public) for i in range(num_runs)]
    found = [[released(keys, data) for keys in runs] for data in zip(x, y, strict=True)]
    made = np.array([[[gap.value / gap.std] for gap in runs] for runs in found])
    guarantee: accounting.Guarantee = found[0][0].guarantee
    epsilon = accounting.epsilon(*guarantee, _DELTA)
    return _tested(made, "record that is least where all others are not", epsilon)


def private_goldstein(num_runs: int = 20_000, *, seed: int = 0) -> AuditResult:
    """Audits the release of a Goldstein bound at a kink, from four records.

    Args:
      num_runs: of each of two neighbouring data sets.
      seed: of insecure keys.

    Returns:
      A bound on epsilon from below that fails with probability 1e-6 at most.

    Example:
      >>> from jaxdp.auditing import functions
      >>> functions.private_goldstein(100_000).passed  # doctest: +SKIP
      True
    """
    data = np.zeros((2, 4, 3), np.float32)
    data[:, 0, 0] = 1e6, -1e6
    plan = plan_of(
        len(data[0]), relation="replace_one", l2_clip_norm=1.3, noise_multiplier=2.0
    )
    x = jnp.zeros(3)

    def losses(x: Any, batch: Any) -> jax.Array:
        return jnp.linalg.norm(x) + batch @ x

    public = Keys.insecure(seed)

    def run(own: Keys) -> jax.Array:
        keys = _known(own, public)
        tx, release = step_of(
            plan, keys, x, losses, reach=0.5, num_points=2, microbatch_size=4
        )
        return jax.vmap(lambda records: release(tx.init(x), records))(data)

    own = simulation.make_keys(simulation.run_seeds(num_runs, seed))
    made = jax.jit(jax.vmap(run, out_axes=1))(own)
    epsilon = plan.epsilon(delta=_DELTA)
    return _tested(np.asarray(made) / plan.noise_std, "saturating record", epsilon)


def tune() -> AuditResult:
    """Audits a search over Laplace mechanisms of epsilon 1, its law enumerated.

    Returns:
      A bound on epsilon from below, without chance.

    Example:
      >>> from jaxdp.auditing import functions
      >>> functions.tune().passed
      True
    """
    multiplier = math.sqrt(2)  # Of scale 1, in what a record moves.
    plan = DPZero(
        num_examples=8,
        num_steps=1,
        sampling=sampling.FullBatch(),
        relation="zero_out",
        l2_clip_norm=1.0,
        smoothing_radius=1e-3,
        noise="laplace",
    )
    search = tuning._search(plan, _TRIALS, 1.0)(multiplier)
    law = law_of_trials(_TRIALS, _TRIALS)
    unknown, rule = 1 - sum(law.values()), bounds.Rule(_DELTA, _FAILURE)

    def below(limit: float, centre: float) -> float:
        """Computes how likely all scores, and so the best, are below a limit."""
        far = math.exp(-abs(limit - centre)) / 2
        one = far if limit < centre else 1 - far
        return sum(p * one**count for count, p in law.items())

    def bound(limit: float) -> tuple[float, float, float]:
        errors = below(limit, 1.0) + unknown, 1 - below(limit, 0.0)
        return bounds.epsilon_lower(*errors, rule)[0], *errors

    lower, false_positive, false_negative = max(map(bound, np.linspace(-4, 5, 91)))
    return AuditResult(
        epsilon_lower=lower,
        epsilon=float(accounting.epsilon(*search, _DELTA)),
        delta=_DELTA,
        failure_prob=0.0,
        method="enumerated law of the number of trials",
        canary="record that lowers the score of every trial",
        num_runs=0,
        num_tested=0,
        num_steps=1,
        false_positive_rate=false_positive,
        false_negative_rate=false_negative,
    )


def law_of_trials(mean_trials: float, num_candidates: int) -> dict[int, float]:
    """Returns the probability of each number of trials that a search makes, at shape 1.

    The sum is less than 1 by what is not followed.
    """
    keys, law = Keys.insecure(0), collections.defaultdict[int, float](float)
    paths: list[tuple[bool, ...]] = [()]
    while paths:
        coins, scores = _Coins(path := paths.pop()), []

        def run(index: Any, own: Keys, scores: list[int] = scores) -> int:
            del index, own
            scores.append(len(scores))
            return scores[-1]

        stub: Any = coins
        tuning._best(run, float, keys, stub, num_candidates, mean_trials, 1.0)
        law[len(scores)] += coins.weight
        paths += [
            (*coins.fell[:place], not coins.fell[place])
            for place in range(len(path), len(coins.fell))
            if coins.others[place] > _LEAST
        ]
    return dict(law)


class _Coins:
    """Coins that fall as they are told, and beyond that "yes".

    Attributes:
      fell: how they did.
      weight: probability of that.
      others: probability of the paths that part from it at each toss.
    """

    def __init__(self, told: tuple[bool, ...]) -> None:
        self.told, self.weight = told, 1.0
        self.fell: list[bool] = []
        self.others: list[float] = []

    def below(self, size: int) -> "_Draw":
        return _Draw(self, size)

    def toss(self, probability: float) -> bool:
        """Answers "yes" with a probability."""
        if probability >= 1:
            return True
        place = len(self.fell)
        yes = place >= len(self.told) or self.told[place]
        here = probability if yes else 1 - probability
        self.others.append(self.weight * (1 - here))
        self.fell.append(yes)
        self.weight *= here
        return yes


@dataclasses.dataclass(frozen=True)
class _Draw:
    """Integer below ``size``, of which nothing is known until it is compared."""

    coins: _Coins
    size: int

    def __lt__(self, limit: int) -> bool:
        return self.coins.toss(limit / self.size)


def _known(own: Keys, public: Keys) -> Keys:
    """Returns keys whose direction root is everybody's."""
    return dataclasses.replace(own, direction=public.direction)


def _tested(made: np.ndarray, canary: str, epsilon: float) -> AuditResult:
    """Attacks Gaussian releases (2, n, R), in standard deviations of the claimed noise."""
    first, second = made[:, :, None]
    rule = bounds.Rule(_DELTA, _FAILURE, gaussian=True)
    learn, choose = (int(share * len(first)) for share in (_LEARN, _CHOOSE))
    linear = attacks.linear(first[:learn], second[:learn])
    found = bounds.attempt(
        "linear", canary, (linear(first[learn:]), linear(second[learn:])), choose, rule
    )
    return result_of(bounds.tested([found], rule), rule, epsilon, _DELTA, len(first))
