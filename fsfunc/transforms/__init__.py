"""Transforms: a function in, a function out, the order of them the configuration."""
