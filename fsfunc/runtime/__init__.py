"""The process: scopes, generators, buffers, memory spaces, compiled functions.

scopes.py           a context variable, no collector, no compiled functions, for a block
generators.py       random states, kept and put back; seeds
memory.py           purposes of memory; its pages; what no step may write; facts by
                    storage, gone with it; buffers that are used in turn
memory_spaces.py    the device's memory, the host's, mapped files
block_codes.py      numbers in 8 bits, by blocks that share a scale
random_blocks.py    random numbers of which any range can be drawn alone
"""
