"""Training within a memory budget: which cuts there are, what each takes, and which is chosen."""
