"""Precision of operations: policies as data, and `perfuse.autocast`, which runs code by them.

A policy and a call come in, the call with casts comes out. Nothing here compiles: a compiler that
traces a region records the casts that this room makes; the rest follows from PyTorch's own state.
"""

from perfuse.precision.conversion import Conversion as Conversion
from perfuse.precision.conversion import prepare as prepare
from perfuse.precision.conversion import without_fp8_state as without_fp8_state
from perfuse.precision.layer_rules import LayerRules as LayerRules
from perfuse.precision.policy import Policy as Policy
from perfuse.precision.policy import default_policy as default_policy
from perfuse.precision.recipe import Recipe as Recipe
from perfuse.precision.recipe import Scaling as Scaling
from perfuse.precision.rules import Rule as Rule
