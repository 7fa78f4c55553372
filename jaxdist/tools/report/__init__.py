"""`python -m jaxdist.report RUN [RUN ...]`: what runs came to, side by side, and their curves.

    runs    one run read from its directory: outcome, config, curves   (read_runs)
    table   the comparison as text                                      (differences, text_table)
    page    one HTML file that needs nothing else                       (html_page)

Reads only; touches no device.
"""
