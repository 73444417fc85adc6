"""Kernels: pure functions on arrays, pytrees and keys.

Nothing here knows a data set, a privacy budget, a step counter or optimiser
state: arrays and keys go in, arrays come out. The only imports are ``jax``,
``numpy`` and ``optax.tree``.

The folder lies at the root of the repository and is imported as
``jaxdp.kernels``, never as ``kernels``: that top-level name belongs to an
unrelated package, and a second copy of these modules under a second name would
give two classes where the code compares types.
"""

# First, before any other import: a checkout's root is on sys.path whenever Python
# runs there, so without this `import kernels` would half work.
if __name__ != "jaxdp.kernels":
    raise ImportError(
        f"this folder cannot be imported as {__name__!r}: "
        "write `import jaxdp.kernels` or `from jaxdp import kernels`",
        name=__name__,
    )

from jaxdp.kernels import clip as clip
from jaxdp.kernels import finite_difference as finite_difference
from jaxdp.kernels import node_noise as node_noise
from jaxdp.kernels import perturb as perturb
from jaxdp.kernels import polytope as polytope
from jaxdp.kernels import prefix_noise as prefix_noise
from jaxdp.kernels import simplex as simplex
from jaxdp.kernels import smoothed_gradient as smoothed_gradient
from jaxdp.kernels import sphere as sphere
from jaxdp.kernels import stretch as stretch
from jaxdp.kernels import threefry as threefry
from jaxdp.kernels import toeplitz_noise as toeplitz_noise
from jaxdp.kernels import tree_noise as tree_noise
