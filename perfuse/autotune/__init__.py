"""Choosing among implementations of one node by measuring them."""
