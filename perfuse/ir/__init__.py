"""The data that all later rooms share: dtypes, index algebra, scalar expressions, the Program.

Lowering builds a Program and scheduling reads it. Everything is immutable and interned, and
nothing here knows an ATen graph, a device or a generator.
"""
