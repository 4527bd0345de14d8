"""Units, gradients, and what a call knows of its surroundings."""
