"""What a step does, seen by running it on tensors without data."""
