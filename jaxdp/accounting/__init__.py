"""Events, and noise to and from (epsilon, delta).

Units, stated once. ``noise_multiplier`` is always the standard deviation of the noise
on the released sum over :func:`sensitivity`: over 2C when a record may be replaced by
any other, over C otherwise, C being the bound on one record's contribution. What
dp-accounting calls a noise multiplier depends on the event and the relation beside it:

* A :class:`Guarantee` of *unsampled* Gaussians is relative to the sensitivity. The
  relation is already in it, so its ``event_relation`` is always ADD_OR_REMOVE_ONE: one
  record moves the sum by one unit.
* A Guarantee of *sampled* Gaussians is relative to C, because an accountant has to know
  whether a record that is drawn moves the sum by C from nothing, or by 2C from another.
  Under ``"replace_one"`` its event holds std/C = 2 ``noise_multiplier``, with
  REPLACE_ONE.

So an event means nothing without its relation. As in dp-accounting's PLD accountant, a
``GaussianDpEvent(m)`` under REPLACE_ONE is two Gaussians 2/m standard deviations apart.
(Its RDP accountant takes the same event to be 1/m under every relation, which is why RDP
never accounts such an event here.)

(Random subsets of a fixed size are the exception that dp-accounting documents: relative
to 2C, under REPLACE_ONE. Its RDP accountant has a loose bound for them; this package adds
a tight one to PLD.) The same holds of Laplace noise,
except that dp-accounting's multiplier is its scale over the L1 sensitivity, which is
``noise_multiplier`` over sqrt(2).

Sequences of unsampled Gaussians are accounted by their closed form; all else by PLD
where it supports the event, and by RDP where only that does. Laplace noise, sampled or
not, also has a pure guarantee (delta = 0), by adding up.
"""

from typing import TYPE_CHECKING, Any

from jaxdp.accounting.basics import MAX_NUMBERS as MAX_NUMBERS
from jaxdp.accounting.basics import RELATIONS as RELATIONS
from jaxdp.accounting.basics import Epsilon as Epsilon
from jaxdp.accounting.basics import Guarantee as Guarantee
from jaxdp.accounting.basics import integer_std as integer_std
from jaxdp.accounting.basics import sensitivity as sensitivity
from jaxdp.accounting.basics import warn_of_budget as warn_of_budget

if TYPE_CHECKING:
    from jaxdp.accounting.calibration import (
        calibrate_noise_multiplier as calibrate_noise_multiplier,
    )
    from jaxdp.accounting.calibration import calibrate_num_steps as calibrate_num_steps
    from jaxdp.accounting.consistency import self_check as self_check
    from jaxdp.accounting.events import composed as composed
    from jaxdp.accounting.events import fixed_size_gaussian as fixed_size_gaussian
    from jaxdp.accounting.events import full_batch_gaussian as full_batch_gaussian
    from jaxdp.accounting.events import full_batch_laplace as full_batch_laplace
    from jaxdp.accounting.events import non_private as non_private
    from jaxdp.accounting.events import poisson_gaussian as poisson_gaussian
    from jaxdp.accounting.events import poisson_laplace as poisson_laplace
    from jaxdp.accounting.events import repeat_and_select as repeat_and_select
    from jaxdp.accounting.events import (
        truncated_poisson_gaussian as truncated_poisson_gaussian,
    )
    from jaxdp.accounting.events import zcdp as zcdp
    from jaxdp.accounting.gaussian import gaussian_delta as gaussian_delta
    from jaxdp.accounting.gaussian import gaussian_epsilon as gaussian_epsilon
    from jaxdp.accounting.gaussian import gaussian_mu as gaussian_mu
    from jaxdp.accounting.gaussian import gaussian_rho as gaussian_rho
    from jaxdp.accounting.lattice import drawn as drawn
    from jaxdp.accounting.lattice import sampler_error as sampler_error
    from jaxdp.accounting.spending import delta as delta
    from jaxdp.accounting.spending import epsilon as epsilon
else:
    # Of this package, which importing them finds.
    _MODULES = {
        "calibration",
        "consistency",
        "events",
        "gaussian",
        "lattice",
        "renyi",
        "spending",
        "subsets",
    }

    def __getattr__(name: str) -> Any:
        """Loads dp-accounting, and with it half of scipy, when it is first needed."""
        if name.startswith("_") or name in _MODULES:
            raise AttributeError(name)
        from jaxdp.accounting import (
            calibration,
            consistency,
            events,
            gaussian,
            lattice,
            spending,
        )

        for module in (calibration, consistency, events, gaussian, lattice, spending):
            found = getattr(module, name, None)
            if getattr(found, "__module__", None) == module.__name__:
                return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
