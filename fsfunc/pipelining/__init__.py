"""Pipelines: a step in stages, its schedule as data, proven before it runs."""
