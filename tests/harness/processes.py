"""Work done in a forked process, where a user's permissions bind it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

NOBODY = 65534


def in_child(work: Callable[[], object], uid: int | None = None) -> None:
    """Run `work` in a forked child, as another user where this one is root; fail if it does."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if uid is not None and os.geteuid() == 0:
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with {status}"
