"""Check that this machine, and all machines of a job, are ready for a long run.

`checks` runs all checks in their order. Each check reads the machine in one function
(`examine_...`) and rates the values in another (`check_...`), which tests call with values of
broken machines.
"""
