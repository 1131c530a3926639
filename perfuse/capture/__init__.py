"""Python callable -> ATen graphs, through Dynamo and AOTAutograd, and back to a callable.

The `torch.compile` backend, ahead-of-time compilation, cross-compilation and the cache of whole
captures start here. Nothing here looks inside a Program or a Plan.
"""
