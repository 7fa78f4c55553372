"""Check that this machine, and all machines of a job, are ready for a long run.

`checks` runs all checks in their order. Functions `examine_...` read the machine, and `check_...`
rate values, in tests those of broken machines.
"""
