"""Commands around training: launch, sweep, doctor, audit, convert, report, compare."""
