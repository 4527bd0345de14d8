"""The process at hand: scopes, generators, buffers, where a compiler stands aside."""
