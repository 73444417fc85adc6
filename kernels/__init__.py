"""Kernels: pure functions on arrays, pytrees and keys.

Nothing here knows a data set, a privacy budget, a step counter or optimiser
state: arrays and keys go in, arrays come out. The only imports are ``jax``,
``numpy`` and ``optax.tree``.

The folder lies at the root of the repository and is imported as
``jaxdp.kernels``, never as ``kernels``: that top-level name belongs to an
unrelated package, and a second copy of these modules under a second name would
give two classes where the code compares types.
"""

if __name__ != "jaxdp.kernels":
    # A checkout's root is on sys.path whenever Python runs there. Other libraries ask
    # whether the package `kernels` is there by importing it: to them, this one is empty.
    from pathlib import Path as _Path

    __path__ = []

    def __getattr__(name: str) -> None:
        """Raises an error with the name under which kernels are imported.

        An ImportError for a kernel, whose words Python shows for ``from kernels import``
        too; for what another library asks the AttributeError that it expects.
        """
        ours = (_Path(__file__).parent / f"{name}.py").is_file()
        raise (ImportError if ours else AttributeError)(
            f"this folder is no package {__name__!r} and has no {name!r}: "
            "write `import jaxdp.kernels` or `from jaxdp import kernels`"
        )

else:
    from jaxdp.kernels import clip as clip
    from jaxdp.kernels import finite_difference as finite_difference
    from jaxdp.kernels import lazy as lazy
    from jaxdp.kernels import node_noise as node_noise
    from jaxdp.kernels import parts as parts
    from jaxdp.kernels import perturb as perturb
    from jaxdp.kernels import polytope as polytope
    from jaxdp.kernels import prefix_noise as prefix_noise
    from jaxdp.kernels import simplex as simplex
    from jaxdp.kernels import smoothed_gradient as smoothed_gradient
    from jaxdp.kernels import sphere as sphere
    from jaxdp.kernels import stochastic_rounding as stochastic_rounding
    from jaxdp.kernels import stretch as stretch
    from jaxdp.kernels import threefry as threefry
    from jaxdp.kernels import toeplitz_noise as toeplitz_noise
    from jaxdp.kernels import tree_noise as tree_noise
