"""Batches of a dataset, each rank reading its own rows, in an order that resumes."""
