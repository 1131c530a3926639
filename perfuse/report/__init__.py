"""Compiled graphs -> what people read: `explain` as one screen, as stages and as an HTML page.

Every artefact comes in, and text goes out. Nothing here changes what is compiled or how.
"""
