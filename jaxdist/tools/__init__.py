"""Commands around training, e.g. launch, sweep, doctor, convert and compare."""
