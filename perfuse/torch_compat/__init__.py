"""Private APIs of PyTorch 2.11 to 2.15, behind functions of our own: a new version is met here.

Nothing else in Perfuse reads a private attribute of PyTorch, and nothing here knows of the
artefacts of the pipeline.
"""
