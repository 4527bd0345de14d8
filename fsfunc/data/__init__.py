"""Batches of a dataset, each rank reading its own rows, in an order that resumes.

loader.py   batches;  dataset.py   the order of rows, and a rank's part
"""
