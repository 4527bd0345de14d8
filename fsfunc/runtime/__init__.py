"""State of the process: context managers, generators, pools of memory, memory spaces.

scopes.py           context managers for a variable, the collector, compiled functions
generators.py       states of random generators, saved and restored; seeds
memory.py           pools of buffers; tables by storage; the kinds of memory in a plan
memory_spaces.py    where a tensor is stored
host_copies.py      copies between host and GPU under way, and who waits for them
stores.py           the host's memory, mapped files; pages, allocated and advised
lazy_imports.py     names of a package that are imported when they are used
random_blocks.py    random numbers of which any range can be drawn alone
"""
