"""Printing for people: amounts in words, tables on rich, repeats folded.

letters.py          letters that would not be seen
markup.py           text, tables and pictures as HTML, for notebooks
tables.py           amounts in words, tables on rich
folding.py          lines and names that repeat, as one
"""
