"""Printing for people: amounts in words, tables on rich, repeats folded.

tables.py           amounts in words, tables on rich
folding.py
"""
