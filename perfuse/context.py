"""`Context`: the one value a stage needs besides its artefact."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch

from perfuse import config
from perfuse.config import Settings
from perfuse.counters import Counters, counters
from perfuse.target import Target, device_target, host_target

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Context:
    """The target, settings and counters of a compile, passed to every stage."""

    target: Target
    settings: Settings
    counters: Counters
    device: torch.device = CPU  # of the tensors that kernels compute on
    tune_until: float = math.inf  # by time.perf_counter; nothing is measured that begins later

    @staticmethod
    def default(settings: Settings | None = None) -> Context:
        """This machine, the settings as they are now, and the process's counters."""
        chosen = config.snapshot() if settings is None else settings
        return Context(host_target(chosen), chosen, counters)

    @property
    def is_interpreted(self) -> bool:
        """Whether the programs of a GPU run on CPU tensors, by an interpreter."""
        return self.settings.gpu.interpret and self.device.type == "cpu"

    def num_jobs(self, num_tasks: int) -> int:
        """The number of builds to run in parallel, given the number of things to build."""
        jobs = self.settings.build.jobs or len(os.sched_getaffinity(0))
        return max(1, min(jobs, num_tasks))

    @staticmethod
    def on(device: torch.device, settings: Settings) -> Context:
        """The target of this device, and the process's counters."""
        return Context(device_target(settings, device), settings, counters, device)
