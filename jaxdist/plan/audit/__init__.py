"""The audit of a mesh: is every sum of the traced train step reduced once, over the right axes?

`audit_program` tracks the state of each value of the traced step over each mesh axis. A `Violation`
is a reduction that is missing, done twice, or adds parts of different elements. Operations without
a rule never cause a violation.
"""

from jaxdist.plan.audit.step import Audit, Violation, audit_program
