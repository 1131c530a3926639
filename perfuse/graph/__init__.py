"""FX -> FX: decompositions used while tracing, clean-up passes, and the forward/backward cut."""
