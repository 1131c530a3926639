"""Reports of what was compiled: `explain` as a screen, as stages and as an HTML page."""
