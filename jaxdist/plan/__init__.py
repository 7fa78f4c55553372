"""`python -m jaxdist.plan`: does a run fit, on which mesh, how fast, at what price.

options, planner    the request and the plan: search, compiler check, cost
advice, scaling     recommended changes, and other GPUs
text, json_record   the plan as text and JSON; drawings of pipeline schedules
estimate            memory, traffic, time and cost by arithmetic
compiled            the train step compiled by the real XLA:GPU compiler, without a GPU
audit               check of every sum of the traced step over every mesh axis
"""
