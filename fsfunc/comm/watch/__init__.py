"""Failure reports of processes: the rank that is missing, by name, on every survivor.

A rank that waits in vain asks the others for their state, through torch's store, and
raises with the answers. A rank that ends by an error tells the others first. Nothing is
sent while all goes well.

mailboxes.py        messages by queues in torch's store
watchdog.py         the last 100 collectives; the thread that watches waits; errors
"""
