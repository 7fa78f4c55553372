"""Format numbers and tables for every command.

numbers  sizes, counts, durations, money, shares and rates
tables   aligned columns, label and text, wrapped lines
"""
