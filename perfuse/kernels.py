"""Library kernels that compute an operation, as candidates for `AlgorithmSelector`."""

from perfuse.autotune.faces import ExternKernelChoice as ExternKernelChoice
from perfuse.autotune.faces import aten_mm_plus_mm as aten_mm_plus_mm
