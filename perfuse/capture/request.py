"""A request to compile a function, with the mode and options it was compiled with."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from perfuse import config
from perfuse.capture.backend import perfuse_backend
from perfuse.capture.modes import overrides_of
from perfuse.config import Settings
from perfuse.precision.whole_model import WholeModel, whole_model_of, without_region
from perfuse.torch_compat.dynamo import call_isolated, compiled_as

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Request:
    """A function, and how it is to be compiled."""

    function: Function  # the original one, if a compiled one was passed
    overrides: Mapping[str, Any]  # of the settings, by its mode and options
    is_dynamic: bool | None
    is_fullgraph: bool
    precision: WholeModel | None = None  # that its calls run in

    @staticmethod
    def of(
        fn: Function, mode: str | None = None, options: Mapping[str, Any] | None = None
    ) -> "Request":
        """The request for `fn`; `mode` and `options` override those it was compiled with."""
        known = compiled_as(without_region(fn))
        is_ours = known.backend is perfuse_backend
        how = known.settings.get
        own = overrides_of(how("mode"), how("options")) if is_ours else {}
        return Request(
            known.function,
            {**own, **overrides_of(mode, options)},
            known.is_dynamic,
            known.is_fullgraph,
            whole_model_of(fn),
        )

    def settings(self) -> Settings:
        """The current settings, with the overrides."""
        return config.snapshot().with_overrides(dict(self.overrides))

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any], backend: Function) -> Any:
        """Compile the function for this call only, with this backend, and call it."""
        with nullcontext() if self.precision is None else self.precision.region(args, kwargs):
            return call_isolated(
                self.function,
                args,
                kwargs,
                backend=backend,
                is_fullgraph=self.is_fullgraph,
                is_dynamic=self.is_dynamic,
            )
