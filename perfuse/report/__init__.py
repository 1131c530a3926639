"""What was compiled, told to people: `explain` and its printed and HTML forms."""
