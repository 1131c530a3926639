"""Built entries and host programs -> callables: loading, launching, pooled memory, artefacts.

Everything that runs per call is here. Nothing here traces, generates or compiles code.
"""
