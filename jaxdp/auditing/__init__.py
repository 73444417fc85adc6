r"""Privacy audits: empirical lower bounds on the epsilon of a plan's compiled mechanism.

An audit runs the compiled mechanism of a plan many thousand times on two neighbouring
data sets and asks how well an attacker tells them apart by what was released. A guarantee
of (epsilon, delta) limits that for *every* attacker, so each attack gives a lower bound on
the epsilon that the code really has. A bound above the accounted epsilon shows, up to the
stated probability of failure, that the code does not keep what the plan says. A bound
below it proves nothing.

The attacker is white-box: it knows the plan, the other records, the canary, the
parameters, every release, and the direction root. All runs of an audit share that one
root, and differ in the noise and sampling roots alone. So whatever can be derived from
the public root, by any stream, role or exact sampler, is one and the same vector in all
runs, and to subtract it is to shift all transcripts alike. Every attack first locates the
transcripts by runs of its own, and thereby subtracts all such streams at once, also those
that nobody thought of: noise that is a function of the direction root has no variance in
an audit, and hides nothing. (``tests/auditing`` plants it.)

* :mod:`jaxdp.auditing.cases`: how the plans of each kind of release are attacked;
* :mod:`jaxdp.auditing.canaries`: neighbouring data sets;
* :mod:`jaxdp.auditing.units`: what they differ in, a record or all records of a user;
* :mod:`jaxdp.auditing.simulation`: transcripts of runs on them;
* :mod:`jaxdp.auditing.attacks`: from a transcript to a score;
* :mod:`jaxdp.auditing.vertices`: the same for plans that draw vertices;
* :mod:`jaxdp.auditing.short_run`, :mod:`jaxdp.auditing.second_order`: the same for plans
  whose queries depend on what was released, and a short run in which they are known;
* :mod:`jaxdp.auditing.draws`: one of those draws, its law enumerated;
* :mod:`jaxdp.auditing.functions`: what is released without a plan that could be audited:
  the private gap and Goldstein bound, and the best of a random number of trials;
* :mod:`jaxdp.auditing.grid_releases`, :mod:`jaxdp.auditing.residues`: what is released, as
  integers of its grid, and whether their low digits show the sum
  (:func:`jaxdp.auditing.lattice`);
* :mod:`jaxdp.auditing.bounds`: from errors of an attack to an epsilon.

References:
  Nasr et al., `Tight Auditing of Differentially Private Machine Learning
  <https://arxiv.org/abs/2302.07956>`_, 2023.
"""

from jaxdp.auditing._audit import AuditResult as AuditResult
from jaxdp.auditing._audit import audit as audit
from jaxdp.auditing._audit import shortened as shortened
from jaxdp.auditing._lattice import LatticeResult as LatticeResult
from jaxdp.auditing._lattice import lattice as lattice
from jaxdp.auditing.residues import LatticeSite as LatticeSite
from jaxdp.core import names as _names


def __dir__() -> list[str]:
    """Lists the public names."""
    return _names.offered(globals())
