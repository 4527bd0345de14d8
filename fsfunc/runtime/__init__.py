"""The process: scopes, generators, buffers, memory spaces, compiled functions.

scoped.py collector.py   a context variable, or no collector, for a block
generators.py       random states, kept and put back; seeds
buffer_pool.py      memory for gathers and reductions, used in turn
memory_kinds.py prefault.py   purposes of memory; its pages, taken in time
memory_spaces.py    the device's memory, the host's, mapped files
save_guard.py       memory that is being saved, which no step may write
block_codes.py      numbers in 8 bits, by blocks that share a scale
random_blocks.py    random numbers of which any range can be drawn alone
compiled.py         compiled functions inside of steps
"""
