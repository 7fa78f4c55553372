"""The audit of a mesh: is every sum of the traced step reduced once, over the right axes?"""

from jaxdist.plan.audit.step import Audit, Violation, audit_program
