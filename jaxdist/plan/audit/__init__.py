"""The audit of a mesh: is every sum of the traced train step reduced once, over the right axes?

`audit_program` tracks the state of each value of the traced step over each mesh axis. Operations
without a rule never cause a `Violation`.
"""

from jaxdist.plan.audit.step import Audit, Violation, audit_program
