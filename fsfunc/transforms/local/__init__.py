"""Ranks that train copies of their own, and synchronise them every few steps.

local_updates.py slow_momentum.py gossiping.py   local_sgd, slowmo, gossip
averaging.py        a state that differs by rank; means of it, consensus
graphs.py           graphs of gossip, as data
"""
