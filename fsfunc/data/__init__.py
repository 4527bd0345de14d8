"""Batches of a dataset, each rank reading its own rows, in an order that resumes.

loader.py   batches;  dataset.py   whose rows, in which order
"""
