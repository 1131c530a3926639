"""A matmul of a plan -> the ways to compute it, each with its text, its build and its measurement.

A *candidate source* is one file and a row of `SOURCES` (`sources.py`): the library, templates,
Composable Kernel. Nothing here measures, or decides which way is fastest.
"""
