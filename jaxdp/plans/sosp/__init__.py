"""Second-order stationary points: the plan, the paper's theorem, certified settings."""

from jaxdp.plans.sosp.plan import SOSP as SOSP
