"""Perfuse: an independent tensor compiler for PyTorch."""
