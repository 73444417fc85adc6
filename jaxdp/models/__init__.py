"""Data sets, small networks and problems with closed forms.

Nothing that computes a release imports this: it is what a run is given and judged
with, not what makes it private.
"""

from jaxdp.core import names as _names
from jaxdp.data.datasets import DATASETS as DATASETS
from jaxdp.data.datasets import Dataset as Dataset
from jaxdp.data.datasets import load as load
from jaxdp.data.datasets import validation_split as validation_split
from jaxdp.data.files import load_file as load_file
from jaxdp.data.problems import centered_quadratic as centered_quadratic
from jaxdp.data.values import show_values as show_values
from jaxdp.models.envelopes import lasry_lions as lasry_lions
from jaxdp.models.envelopes import lasry_lions_mean as lasry_lions_mean
from jaxdp.models.envelopes import lasry_lions_settings as lasry_lions_settings
from jaxdp.models.envelopes import moreau_envelope as moreau_envelope
from jaxdp.models.games import rock_paper_scissors as rock_paper_scissors
from jaxdp.models.groups import Grouped as Grouped
from jaxdp.models.groups import group_errors as group_errors
from jaxdp.models.groups import grouped as grouped
from jaxdp.models.groups import worst_group as worst_group
from jaxdp.models.networks import network_for as network_for
from jaxdp.models.nonsmooth import max_of_linear as max_of_linear
from jaxdp.models.nonsmooth import mean_gradient_fn as mean_gradient_fn
from jaxdp.models.principal import PrincipalDirections as PrincipalDirections
from jaxdp.models.principal import captured_variance as captured_variance
from jaxdp.models.principal import moment_deviation as moment_deviation
from jaxdp.models.principal import unit_rows as unit_rows
from jaxdp.models.strict_saddles import cosine_grid as cosine_grid


def __dir__() -> list[str]:
    """Lists the public names."""
    return _names.offered(globals())
