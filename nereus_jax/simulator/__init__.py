"""The same controller on a virtual clock: traces, a simulated cluster, policies and their ledgers.

All seconds and bytes of this package are simulated; none is measured.
"""
