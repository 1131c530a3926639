"""Built code and decisions kept on disk: keys and files come in, checked entries come out.

Nothing here compiles, and nothing reads or removes a file except through the store.
"""
