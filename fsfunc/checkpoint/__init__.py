"""States that outlive the run: saved on one mesh, loaded on another."""
