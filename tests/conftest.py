"""Makes `reference` (oracles and strategies shared by the tiers) importable from every test."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

# A shell that starts the tests in the background has them ignore Ctrl-C, and every program they start would too.
signal.signal(signal.SIGINT, signal.default_int_handler)
