"""How every command prints numbers and tables.

numbers  sizes, counts, durations, money, shares and rates
tables   aligned columns, label and text, wrapped lines
"""
