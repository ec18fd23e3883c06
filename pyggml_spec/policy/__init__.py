"""Policies: pure functions of what rounds observed, that say whether and how much to speculate next."""

from pyggml_spec.policy.fixed import FixedPolicy
from pyggml_spec.policy.protocol import DraftLimits, DraftPlan, Policy, RoundObservation

__all__ = ["DraftLimits", "DraftPlan", "FixedPolicy", "Policy", "RoundObservation"]
