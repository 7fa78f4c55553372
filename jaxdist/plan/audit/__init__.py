"""The audit of a mesh: is every sum of the traced train step taken, once, over the right devices?

`audit_program` follows each value of the traced step over each mesh axis, before anything is
compiled. A sum that is missing, taken twice, or taken of parts that do not belong together is a
`Violation` with its parameter, axis, line and fix. What the pass does not know raises no alarm.
"""

from jaxdist.plan.audit.step import Audit, Violation, audit_program
