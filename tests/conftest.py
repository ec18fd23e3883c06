"""Makes `reference` (oracles and strategies shared by the tiers) importable from every test."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
