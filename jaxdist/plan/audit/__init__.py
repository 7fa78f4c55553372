"""The audit of a mesh: is every sum of the traced train step taken once, over the right axes?

`audit_program` follows each value of the traced step over each mesh axis. A `Violation` is a sum
that is missing, taken twice, or taken of unrelated parts. Unknown operations raise no alarm.
"""

from jaxdist.plan.audit.step import Audit, Violation, audit_program
