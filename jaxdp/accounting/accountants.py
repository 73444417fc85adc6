"""Names of :mod:`jaxdp.accounting` whose modules load dp-accounting."""

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
