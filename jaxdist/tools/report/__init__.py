"""`python -m jaxdist.report RUN [RUN ...]`: compare outcomes and curves of runs.

    runs    read the outcome, settings and curves of a run from its directory
    table   the comparison as text
    page    the comparison and the curves as one HTML file

It only reads and starts no device.
"""
