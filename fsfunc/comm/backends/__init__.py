"""Links: what carries a rank's collectives to the other ranks."""
