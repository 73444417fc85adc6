r"""Smoothing of nonsmooth losses in few dimensions, with proven errors.

The Moreau envelope and the Lasry-Lions smoothing of an L-Lipschitz h are

.. math:: M_\lambda h(x)=\min_y\Big[h(y)+\frac{\|y-x\|^2}{2\lambda}\Big],\qquad
   \tilde h_\lambda(x)=-M_\lambda(-M_{2\lambda}h)(x)=\max_z\min_y\Big[h(y)
   +\frac{\|y-z\|^2}{4\lambda}-\frac{\|z-x\|^2}{2\lambda}\Big].

:math:`\tilde h_\lambda` is differentiable for every h, with
:math:`\nabla\tilde h_\lambda(x)=(z^*-x)/\lambda`. It is L-Lipschitz, its gradient
:math:`1/\lambda`-Lipschitz, :math:`0\le h-\tilde h_\lambda\le L^2\lambda`, and h and
:math:`\tilde h_\lambda` have the same minimisers. Where
:math:`\|\nabla\tilde h_\lambda(x)\|\le\beta`, x is
:math:`(3\lambda L,\beta)`-Goldstein stationary for h: :func:`lasry_lions_smoothing`.

**Two searches**, by what the caller asserts about h:

* ``weak_convexity=w``: :math:`h+\frac w2\|\cdot\|^2` is convex (w = 0: h is). For
  :math:`2\lambda w\le1` it makes :math:`\tilde h_\lambda=M_\lambda h`, and the minimum over
  y is one of a strongly convex function: cutting planes, any d <= 10. (Proof:
  :math:`M_{2\lambda}h=M_\lambda M_\lambda h`, and
  :math:`-M_\lambda(-M_\lambda f)=f` wherever :math:`f+\|\cdot\|^2/2\lambda` is convex;
  :math:`f=M_\lambda h` is :math:`w/(1-\lambda w)`-weakly convex.)
* ``lipschitz=L``: branch and bound in the ball of radius :math:`3\lambda L` (Moreau:
  :math:`\lambda L`), exponential in d. Values alone cannot tell a smooth minimum from its
  neighbourhood faster: a gap g takes about :math:`(\lambda L^2/g)^{d/2}` evaluations. With
  a weak convexity as well, of any size, subgradients do better.

**Cost**, in evaluations of h at one x: median (largest) of nine, ``bench/envelopes.py``:

=====================================  ==================  ====================
search                                 to 1e-6, d = 1      in more dimensions
=====================================  ==================  ====================
values, :math:`\lambda L^2=1/2`        77 (8771)           d = 2, to 1e-3: 25983 (38685);
                                                           d = 3, to 1e-2: 77703 (136249)
subgradients too, :math:`\lambda w=1`  61 (69)             d = 2, to 1e-6: 5385 (17967);
                                                           d = 3, to 1e-4: 66921 (148261)
=====================================  ==================  ====================

Cutting planes took 9, 13 and 18 to 1e-6 in 2, 5 and 10 dimensions. A hundred thousand
evaluations of a cheap loss take seconds.

A search stops at ``tolerance`` or ``max_evaluations``, and its result carries the bounds it
has: read ``gap`` and ``gradient_error``, always. They rest on the asserted constants, which
are checked no further than the search happens to see.

Host side, in float64; d <= 10, at most 200 records. Nothing here is private.

References:
  Lasry and Lions, 1986; appendix B of Kornowski, Liu and Talwar, `Improved sample
  complexity for private nonsmooth nonconvex optimization
  <https://arxiv.org/abs/2410.05880>`_, 2025, corrected: its equation (19) evaluates h at
  the outer variable, which is unbounded from below, and Fact B.2 has L for L^2 in
  :math:`L^2\lambda` and :math:`L/\lambda` for :math:`1/\lambda`.
"""

from jaxdp.models.envelopes.searches import Smoothed as Smoothed
from jaxdp.models.envelopes.settings import LasryLionsSettings as LasryLionsSettings
from jaxdp.models.envelopes.settings import lasry_lions_settings as lasry_lions_settings
from jaxdp.models.envelopes.settings import (
    lasry_lions_smoothing as lasry_lions_smoothing,
)
from jaxdp.models.envelopes.smoothing import lasry_lions as lasry_lions
from jaxdp.models.envelopes.smoothing import lasry_lions_mean as lasry_lions_mean
from jaxdp.models.envelopes.smoothing import moreau_envelope as moreau_envelope
