"""Random programs with Python values that change between calls and processes, on one cache."""
