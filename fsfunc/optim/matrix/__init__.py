"""Optimizers of whole matrices: each is computed by one rank, its owner.

orthogonal_momentum.py   muon
preconditioning.py  shampoo; its covariances and roots
matrix_exchange.py   each matrix on one rank, back in parts
"""
