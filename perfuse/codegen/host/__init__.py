"""Plan and kernel sources -> the host program: Python text that allocates and launches in order.

Turns, allocation and reuse are written as the plan says. Nothing is decided here.
"""
