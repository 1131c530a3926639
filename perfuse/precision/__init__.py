"""Precision of operations: policies as data, and `perfuse.autocast`, which runs code by them.

A policy and a call come in, the call with casts comes out. Nothing here compiles: a compiler that
traces a region records the casts that this room makes, and PyTorch's own state says the rest.
"""

from perfuse.precision.policy import Policy as Policy
from perfuse.precision.policy import default_policy as default_policy
from perfuse.precision.rules import Rule as Rule
