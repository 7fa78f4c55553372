"""Commands around training: launch, doctor, convert, report."""
