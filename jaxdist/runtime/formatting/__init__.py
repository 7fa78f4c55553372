"""How numbers, tables, pages and charts look, for every command: callers say only what is shown.

numbers  sizes, counts, durations, money, shares and rates as people read them
tables   aligned columns, label and text, wrapped lines
html     a page that loads nothing, with its stylesheet, and tables in it
charts   curves, stacked bars and timelines as SVG
"""
