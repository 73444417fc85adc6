"""Buffered Toeplitz noise that is optimised for a period, by jax_privacy."""

import functools

import jax
import numpy as np

from jaxdp.kernels import node_noise, toeplitz_noise

#: More buffers gain nothing and make the optimisation ill-conditioned.
MAX_BUFFERS = 10


@functools.cache
def optimise_blt(period: int, num_buffers: int) -> toeplitz_noise.Buffered:
    """Returns the buffered Toeplitz kernel of least worst variance at equal sensitivity.

    Takes seconds to half a minute on the host, once for each pair of arguments. The
    numbers that ship (``toeplitz_noise.blt``) are those for 16, 64, 256, 1024 and 4096
    steps.

    Args:
      period: steps of one period.
      num_buffers: from 1 to 10; so many vectors of memory.

    Returns:
      A kernel with parameters that were found by ``jax_privacy``; its norms are exact for
      these parameters, however good they are.

    Raises:
      ImportError: ``jax_privacy`` is not installed (the extra ``mf``).
      ValueError: a number out of range.
    """
    node_noise.check_period(period)
    if not 1 <= num_buffers <= MAX_BUFFERS:
        raise ValueError(
            f"num_buffers must be from 1 to {MAX_BUFFERS}, got {num_buffers}"
        )
    try:
        # An extra: pyright may not find it.
        from jax_privacy.matrix_factorization import (  # pyright: ignore[reportMissingImports]
            buffered_toeplitz,
        )
    except ImportError as error:
        raise ImportError(
            "optimise_blt needs jax_privacy: pip install 'jaxdp-optim[mf]'. "
            "The kernels blt_1, blt_2 and blt_3 ship with numbers and need nothing."
        ) from error
    with jax.enable_x64(True):
        found = buffered_toeplitz.optimize(
            n=period, error="max", min_buffers=num_buffers, max_buffers=num_buffers
        )
        decay, scale = (np.asarray(x) for x in (found.buf_decay, found.output_scale))
    return toeplitz_noise.Buffered(
        period, tuple(map(float, decay)), tuple(map(float, scale))
    )
