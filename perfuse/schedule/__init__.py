"""Program -> Plan: which nodes share a kernel, in which order, and where buffers live."""
