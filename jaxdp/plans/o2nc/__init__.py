"""Online-to-non-convex conversion: the plan, the papers' theorems, a certified design."""

from jaxdp.plans.o2nc.plan import O2NC as O2NC
