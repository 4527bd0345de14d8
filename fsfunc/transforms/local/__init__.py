"""Ranks that train copies of their own, and meet now and then.

local_updates.py slow_momentum.py gossiping.py   local_sgd, slowmo, gossip
averaging.py        a state that differs by rank; means of it, consensus
graphs.py           who gossips with whom, as data
"""
