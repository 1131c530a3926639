"""Plan -> Plan, with choices made by measurement: matmul libraries on a CPU, tiles on a GPU.

Candidates are raced on this machine and the decisions are cached. A choice changes speed and
never results beyond rounding; nothing here decides fusion or memory.
"""
