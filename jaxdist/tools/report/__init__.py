"""`python -m jaxdist.report RUN [RUN ...]`: compare outcomes and curves of runs."""
