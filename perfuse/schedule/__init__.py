"""Program -> Plan: which loops share a kernel, in which order, and where buffers are in memory.

A plan says everything that the host program and the kernels do. Nothing here writes code or
changes what a loop computes, and what could not be fused is recorded with its reason.
"""
