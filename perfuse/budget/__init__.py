"""Joint training graph and memory budget -> the cheapest cut whose simulated peak fits.

Candidate cuts depend on the graph alone, and each is judged by the plan it would compile to.
Nothing here generates code or changes a plan.
"""
