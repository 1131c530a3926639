"""Plan -> Sources: `cpp/` spells kernels, `host/` the program that allocates and launches."""
