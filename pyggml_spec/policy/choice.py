"""Policies by name, kept so that they go on learning from one generation to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pyggml_spec.errors import OptionError
from pyggml_spec.policy.cost import CostPolicy
from pyggml_spec.policy.ema import EmaPolicy
from pyggml_spec.policy.fixed import FixedPolicy
from pyggml_spec.policy.protocol import Policy

PolicyName = Literal["fixed", "ema", "cost"]
_MAKERS: dict[str, Callable[[], Policy]] = {"fixed": FixedPolicy, "ema": EmaPolicy, "cost": CostPolicy}
POLICY_NAMES = tuple(_MAKERS)


class PolicyShelf:
    """The policies of one pair of models, each made at its first use; chains and trees are learned apart."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, bool], Policy] = {}

    def choose(self, name: str | None, mode: str) -> Policy:
        """The policy of this name; without one `cost` for the mode auto, `fixed` for others.

        Raises:
            OptionError: there is no such policy.
        """
        name = ("cost" if mode == "auto" else "fixed") if name is None else name
        if not isinstance(name, str) or name not in _MAKERS:
            raise OptionError(f"`policy` is {name!r}: it must be one of {', '.join(POLICY_NAMES)}")
        key = (name, mode == "tree")
        if key not in self._kept:
            self._kept[key] = _MAKERS[name]()
        return self._kept[key]
