"""The command `jaxdist audit`; the pass itself is `jaxdist.plan.audit`."""
