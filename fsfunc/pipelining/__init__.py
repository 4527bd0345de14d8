"""Pipelines: a step over several stages, its schedule as data, proven before it runs."""
