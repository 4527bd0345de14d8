"""Printing for people: amounts in words, tables on rich, repeats folded.

amounts.py tables.py folding.py
"""
