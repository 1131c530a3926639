"""Private APIs of PyTorch 2.11 to 2.15, behind our own functions: adapt to new versions here.
Nothing else in Perfuse reads a private attribute of PyTorch, and nothing here knows about the
artefacts of the pipeline.
"""
