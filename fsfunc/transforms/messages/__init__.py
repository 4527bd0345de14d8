"""Messages: buffers sent narrower, in levels, in few directions, with feedback.

wire.py quantization.py   how a buffer travels: encode, move, decode; in 8 bits
narrow_wire.py hierarchy.py   in a narrower dtype; in levels, across nodes and within
residuals.py        error_feedback: what a lossy reduction owes, paid later
low_rank.py         powersgd: gradients by their strongest directions
"""
