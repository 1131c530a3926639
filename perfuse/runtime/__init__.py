"""Loading and running what was built."""
