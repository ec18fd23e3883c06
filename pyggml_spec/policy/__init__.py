"""Policies: pure functions of what rounds observed, that say whether and how much to speculate next."""

from pyggml_spec.policy.choice import POLICY_NAMES, PolicyName, PolicyShelf
from pyggml_spec.policy.cost import CostPolicy
from pyggml_spec.policy.ema import EmaPolicy
from pyggml_spec.policy.fixed import FixedPolicy
from pyggml_spec.policy.protocol import DraftLimits, DraftPlan, Policy, RoundObservation

__all__ = [
    "POLICY_NAMES",
    "CostPolicy",
    "DraftLimits",
    "DraftPlan",
    "EmaPolicy",
    "FixedPolicy",
    "Policy",
    "PolicyName",
    "PolicyShelf",
    "RoundObservation",
]
