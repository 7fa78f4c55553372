"""Pipeline parallelism: schedules as tables, their executor, and the split backward."""
