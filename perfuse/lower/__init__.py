"""ATen graph -> Program: one small function per op family. Start at `graph.lower_graph`."""
