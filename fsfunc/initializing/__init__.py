"""Init functions run on tensors without values; each rank makes its own parts."""
