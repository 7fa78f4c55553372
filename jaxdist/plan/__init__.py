"""`python -m jaxdist.plan`: does a run fit, on which mesh, how fast, at what price.

options, planner    the question; its answer: the search, the compiler's check, the bill
advice, scaling     what to change, and what other GPUs would do
text, page, json_record, schedule_view   the answer as text, HTML, JSON; schedules drawn
estimate            memory, traffic, time and cost by arithmetic
compiled            the train step compiled by the real XLA:GPU compiler, without a GPU
audit               every sum of the traced step followed over every mesh axis
hardware            what is known of GPUs
"""
