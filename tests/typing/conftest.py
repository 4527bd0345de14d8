"""The programs here are read by a checker and not run."""

collect_ignore = ["program.py", "mistakes.py"]
