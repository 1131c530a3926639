"""Joint training graph -> the values that the forward saves: a minimum cut of bytes saved.

A level limits what may be recomputed. Nothing here changes a graph; `graph/partition.py` does.
"""
