"""Find the first difference between two runs that should be equal, by records and by rerun."""
