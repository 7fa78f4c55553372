"""`python -m jaxdist.plan`: estimate whether a run fits, on which mesh, how fast, at what cost.

options, planner    settings of a plan; the plan: search, compiler check, cost
advice, scaling     recommended changes; other GPU types and counts
text, json_record   the plan as text and JSON; drawings of pipeline schedules
estimate            analytical model of memory, traffic, time and cost
compiled            compiles the train step with the real XLA:GPU compiler, without a GPU
audit               checks every reduction of the traced step over every mesh axis
"""
