"""One call at a time: sequences of an engine share graphs, scratch memory and cell tables, so threads take turns."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


def alone(method: Method) -> Method:
    """Run a method while holding its object's `lock`, which a thread that holds it may take again."""

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return method(self, *args, **kwargs)

    return cast(Method, run)
