"""What a step will do and what it will cost, before it runs."""
