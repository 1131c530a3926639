"""Every architecture of `transformers` that can be made small, its forward."""

from __future__ import annotations

from tests.sweep.subject import NotMade, Subject


def names() -> list[str]:
    from tests.models.tiny import model_types

    return model_types()


def make(name: str, variant: str) -> Subject:
    import transformers

    from tests.models import tiny

    transformers.logging.set_verbosity_error()
    try:
        made = tiny.make(name)
    except tiny.NotMade as error:
        raise NotMade(str(error)) from None
    return Subject(made.model, ((), dict(made.inputs)), made.recipe)
