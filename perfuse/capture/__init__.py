"""From a Python callable to ATen graphs, through Dynamo and AOTAutograd."""
