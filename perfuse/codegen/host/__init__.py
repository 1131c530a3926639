"""The host program: Python text that allocates buffers and launches kernels and calls in order."""
